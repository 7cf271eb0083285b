"""`tightlip represent attack` as one call: what eavesdroppers read from a run's vectors."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightlip.core.errors import UsageError
from tightlip.core.files import digest_of_files, read_json, write_json
from tightlip.core.run_folder import CONFIG
from tightlip.core.settings import read_toml

if TYPE_CHECKING:
    import numpy as np

    from tightlip.vectors.attack import AttackSettings, Heard
    from tightlip.vectors.attackers import Parts, Releases
    from tightlip.vectors.data import Examples
    from tightlip.vectors.device import Device


RESULT = "attack.json"
FORMAT = 1
FEW_USERS = 20
SEVERAL_RUNS = Path("attacks")


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What the attackers found in each run, and the folder for it."""

    results: list[dict[str, Any]]
    folder: Path
    num_kept: int  # runs whose figures were there already


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What one command wants to know of each run."""

    settings: "AttackSettings"
    attributes: Sequence[str] | None
    entities: str | None
    batch_size: int
    device: str

    def tree(self) -> dict[str, Any]:
        """What changes the figures; kept with them, so that the same question is not asked twice."""
        attributes = None if self.attributes is None else list(self.attributes)
        settings = asdict(self.settings) | {"attackers": list(self.settings.attackers)}
        names = Path(self.entities) if self.entities else None
        digest = digest_of_files([names]) if names and names.is_file() else None
        return {
            **settings,
            "attributes": attributes,
            "entities": self.entities,
            "entities_digest": digest,
        }


def attack_runs(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    attackers: Sequence[str] | None = None,
    copies: int = 16,
    attributes: Sequence[str] | None = None,
    entities: str | Path | None = None,
    pictures: bool = True,
    again: bool = False,
    seed: int = 0,
    num_bootstraps: int = 1000,
    batch_size: int = 32,
    device: str = "auto",
) -> Attacked:
    """Attack the vectors of one run or several, and write attack.json and report.html.

    `attributes` are columns to read in place of the run's private ones; `entities` is a file of
    names, `auto`, or `column:NAME`. The figures of each run are kept in RUN/attack.json and taken
    from there when the same is asked again, unless `again`. The page is in `out`: by default the
    run's own folder, or `attacks` for several runs.
    """
    from tightlip.core.devices import usable_device
    from tightlip.vectors.attack import AttackSettings
    from tightlip.vectors.attackers import ATTACKERS, sklearn_part

    sklearn_part("linear_model")  # refused here, not after an hour of encoding
    settings = AttackSettings(
        attackers=tuple(attackers or ATTACKERS),
        copies=copies,
        seed=seed,
        num_bootstraps=num_bootstraps,
        pictures=pictures,
    )
    asked = _Asked(
        settings=settings,
        attributes=attributes,
        entities=None if entities is None else str(entities),
        batch_size=batch_size,
        device=usable_device(device),
    )
    given = [runs] if isinstance(runs, str | Path) else list(runs)
    folders = _runs(given)
    for folder, _ in folders:
        _pair(folder)  # refused before the first of them is encoded
    results, num_kept = [], 0
    for folder, group in folders:
        kept = None if again else _kept(folder, asked)
        result = kept or _attacked(folder, asked)
        num_kept += kept is not None
        results.append({**result, "run": _name(folder, group), "group": group})
    folder = Path(out) if out is not None else Path(given[0]) if len(given) == 1 else SEVERAL_RUNS
    if folder.is_file():
        raise UsageError(f"{folder} is a file. Name a folder for the page: --out DIR")
    return Attacked(results=results, folder=folder, num_kept=num_kept)


def _runs(given: Sequence[str | Path]) -> list[tuple[Path, str | None]]:
    """Each run's folder; a folder of several seeds stands for all of them, as one group."""
    found: list[tuple[Path, str | None]] = []
    for path in map(Path, given):
        if (path / "summary.json").is_file() and not (path / CONFIG).is_file():
            seeds = sorted(path.glob("seed-*"), key=lambda seed: (len(seed.name), seed.name))
            found += [(seed, path.name or str(path)) for seed in seeds]
        else:
            found.append((path, None))
    if not found:
        raise UsageError("No run was given. Name at least one: tightlip represent attack RUN")
    names = [folder.resolve() for folder, _ in found]
    if len(set(names)) < len(names):
        raise UsageError("The same run is given twice. Name each once.")
    for folder, _ in found:
        if not all((folder / half).is_dir() for half in ("device", "server")):
            raise UsageError(
                f"{folder} holds no finished run with both halves (device and server). "
                f"Run: tightlip represent train CORPUS --out {folder}"
            )
    return found


def _name(folder: Path, group: str | None) -> str:
    return f"{group}/{folder.name}" if group else folder.name or str(folder)


def _kept(folder: Path, asked: _Asked) -> dict[str, Any] | None:
    """The figures already there, if they answer the same question about the same halves."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        written = read_json(path)
        (result,) = written["runs"]
        same = result["asked"] == asked.tree() and result["pair"] == _pair(folder)
        same &= written["format"] == FORMAT
        return _without_chosen_gaps(result) if same else None
    except (ValueError, KeyError, TypeError):
        return None  # another version's, or damaged: measured again


def _without_chosen_gaps(result: dict[str, Any]) -> dict[str, Any]:
    """Figures as an earlier version kept them, less the intervals of gaps between chosen groups."""
    for found in result["fairness"].values():
        if len(found["groups"]) > 2:
            found["gap"] |= {"low": None, "high": None}
    return result


def _pair(folder: Path) -> str:
    """The training that both halves come from."""
    from tightlip.vectors.halves import DEVICE, SERVER, read_half

    device, server = (str(read_half(folder / half, half)["pair"]) for half in (DEVICE, SERVER))
    if device != server:
        raise UsageError(
            f"The halves in {folder} come from two trainings: the device belongs to the pair {device}, and the server to "
            f"{server}. Attack the folder that one `tightlip represent train` wrote."
        )
    return device


# One run
def _attacked(folder: Path, asked: _Asked) -> dict[str, Any]:
    from tightlip import __version__
    from tightlip.vectors.attack import attack
    from tightlip.vectors.data import load_examples
    from tightlip.vectors.device import load_device

    examples, device = load_examples(folder), load_device(folder / "device")
    settings = _with_what_varies(asked.settings, device)
    asked_here = replace(asked, settings=settings)
    heard, entities_from = _heard(folder, examples, device, asked_here)
    found = attack(heard, settings, device=asked.device)
    result = {
        **_about(folder, device),
        "asked": asked.tree(),
        "pair": device.pair,
        "releases": _cost(settings, device),
        "entities_from": entities_from,
        **_plain(found),
    }
    result |= _about_rows(examples, result)
    kept = {**result, "run": folder.name, "group": None}
    write_json(folder / RESULT, {"format": FORMAT, "version": __version__, "runs": [kept]})
    return result


def _with_what_varies(settings: "AttackSettings", device: "Device") -> "AttackSettings":
    """Releases that are all the same leave nothing to average."""
    if device.mechanism.mechanism != "none" or device.mechanism.dropout:
        return settings
    others = tuple(name for name in settings.attackers if name != "averaged")
    return replace(settings, attackers=others, copies=1)


def _heard(
    folder: Path, examples: "Examples", device: "Device", asked: _Asked
) -> tuple["Heard", str | None]:
    """The run as arrays, and where the names in its texts come from."""
    from tightlip.vectors import attack_data
    from tightlip.vectors.attack import Heard

    parts = attack_data.parts_of_run(examples)
    attributes, listing = attack_data.listing_columns(folder, examples, asked.attributes)
    source = asked.entities or listing
    targets = attack_data.targets_of(folder, examples, parts, attributes)
    entities = None
    if source is not None:
        entities = attack_data.entities_of(folder, examples, parts, source)
    if not targets and entities is None:
        raise UsageError(
            f"{folder} has no private columns, so there is nothing to read. Name some: --attributes, or --entities."
        )
    releases, bare = _vectors(examples, parts, device, asked)
    right, plain = _main_task(folder, examples, parts, releases)
    users = attack_data.users_of(examples)
    heard = Heard(
        releases=releases,
        bare=bare,
        targets=targets,
        entities=entities,
        users=[users[place] for place in parts.test],
        seen=attack_data.seen_in_train(examples, parts),
        main_right=right,
        main_plain=plain,
    )
    return heard, source


def _vectors(
    examples: "Examples", parts: "Parts[np.ndarray]", device: "Device", asked: _Asked
) -> tuple["Releases", "Parts[np.ndarray]"]:
    """Fresh releases as an eavesdropper hears them, and the normalised vectors before noise."""
    from tightlip.vectors.attack_data import released_afresh
    from tightlip.vectors.grid_noise import GridNoise
    from tightlip.vectors.release import released, unit_ball, unit_range

    options: dict[str, Any] = {"batch_size": asked.batch_size, "device": asked.device}
    mechanism, noise = device.mechanism, GridNoise()
    raw = device.extractor.encode(examples.texts, **options)

    def encode(texts: list[str]) -> "np.ndarray":
        # Without masked words every release begins with the same vectors; only noise is fresh.
        if mechanism.dropout:
            return device.encode(texts, **options)
        return released(raw, mechanism, noise)

    releases = released_afresh(encode, examples.texts, parts, copies=asked.settings.copies)
    normalise = unit_ball if mechanism.normalisation == "unit-ball" else unit_range
    bare = normalise(raw).astype("float32")
    return releases, parts.map(lambda places: bare[places])


def _main_task(
    folder: Path, examples: "Examples", parts: "Parts[np.ndarray]", releases: "Releases"
) -> tuple["np.ndarray", "np.ndarray"]:
    """Whether the server, and whether the commonest training label, is right on each test text."""
    import numpy as np

    from tightlip.vectors.server import load_server

    labels, _ = load_server(folder / "server").classify(releases.single.test)
    truth = examples.label_ids
    number = {name: place for place, name in enumerate(examples.labels)}
    guessed = np.asarray([number.get(name, -1) for name in labels])
    commonest = np.bincount(truth[parts.train], minlength=len(examples.labels)).argmax()
    return guessed == truth[parts.test], truth[parts.test] == commonest


def _about(folder: Path, device: "Device") -> dict[str, Any]:
    tree = read_toml(folder / CONFIG)["represent"]
    return {
        "method": tree.get("method", "dpnr"),
        "mechanism": device.mechanism.mechanism,
        "epsilon": device.mechanism.epsilon,
        "dropout": device.mechanism.dropout,
        "dimensions": device.mechanism.dimensions,
        "extractor": Path(tree.get("extractor", "lstm")).name,
        "label": tree["label"],
        "training_seed": tree.get("seed", 0),
        "guarantee": device.mechanism.record(),
    }


def _cost(settings: "AttackSettings", device: "Device") -> dict[str, Any] | None:
    """What the releases that are averaged cost together; null where none are."""
    from tightlip.vectors.guarantees import cost_of_releases

    if "averaged" not in settings.attackers:
        return None
    epsilon, how = cost_of_releases(device.mechanism, settings.copies)
    known = math.isfinite(epsilon)
    whole = device.mechanism.epsilon_of(
        device.mechanism.delta, dropout=False, num_releases=settings.copies
    )
    return {
        "num": settings.copies,
        "epsilon": epsilon if known else None,
        "delta": device.mechanism.delta if known else None,
        "how": how,
        "any_two_texts": whole if known else None,
    }


def _about_rows(examples: "Examples", result: dict[str, Any]) -> dict[str, Any]:
    from tightlip.vectors.attack_data import known_users, parts_of_run

    parts = parts_of_run(examples)
    known = known_users(examples, parts)
    return {
        "num_train": len(parts.train),
        "num_dev": len(parts.dev),
        "has_users": examples.users is not None,
        "num_test_of_known_users": known,
        "notes": list(_notes(result, examples.users is not None, known)),
    }


def _notes(result: dict[str, Any], has_users: bool, known: int) -> Sequence[str]:
    """What to keep in mind, in sentences."""
    notes = []
    if not has_users:
        notes.append(
            "The corpus has no users, so each row is taken for an independent piece; if some people wrote several, the "
            "intervals are too short."
        )
    elif result["num_test_users"] < FEW_USERS:
        notes.append(f"{result['num_test_users']} test users are few: the intervals are rough.")
    if known:
        notes.append(
            f"{known:,} of {result['num_test']:,} test texts are by people who have training texts too, so an attacker may "
            "know the author rather than the attribute. Train with --split user to rule that out."
        )
    if result["num_seen_in_train"]:
        notes.append(
            f"{result['num_seen_in_train']:,} of {result['num_test']:,} test texts also stand in the training part, where "
            "attackers and classifier have seen them; figures without them stand beside."
        )
    left_out = (result["entities"] or {}).get("num_left_out")
    if left_out:
        notes.append(f"{left_out:,} of the names given are too rare in the training part to learn.")
    return notes


def _plain(value: Any) -> Any:
    """The same without numbers that JSON has no word for: what is not known is null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
