"""`tightlip represent attack` as one call: what eavesdroppers read from the vectors of each run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tightlip import __version__
from tightlip.core.checksums import listed
from tightlip.core.devices import usable_device
from tightlip.core.errors import DamagedError, UsageError
from tightlip.core.files import claimed, digest_of_files, names_in, read_json, write_json
from tightlip.core.gates import Known
from tightlip.core.progress import task
from tightlip.core.resampling import FEW_USERS
from tightlip.core.run_folder import CONFIG
from tightlip.core.settings import read_toml, split_settings
from tightlip.vectors.attack import COLUMN, AttackInput, attack, entities_of, is_listing, target_of
from tightlip.vectors.attack_figures import Target
from tightlip.vectors.attackers import Arrays, Parts, Releases, sklearn_part
from tightlip.vectors.categories import categories
from tightlip.vectors.data import PARTS, Examples, columns_of_run, load_examples
from tightlip.vectors.encode import Device, load_device
from tightlip.vectors.grid_noise import GridNoise
from tightlip.vectors.guarantees import BARE, cost_record
from tightlip.vectors.halves import DEVICE, SERVER, read_half
from tightlip.vectors.release import normalised, released
from tightlip.vectors.server import load_server
from tightlip.vectors.settings import AttackSettings, EncodingOptions

RESULT = "attack.json"
FORMAT = 1
SEVERAL_RUNS = Path("attacks")
Encoding = dict[str, Any]  # how texts are encoded, and where
Runs = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """What the attackers found in each run, and the folder with attack.json and the page."""

    results: list[dict[str, Any]]
    folder: Path
    num_kept: int  # runs whose figures were there already

    @property
    def page(self) -> Path:
        return self.folder / "report.html"


def result_folder(runs: Runs, out: str | Path | None = None) -> Path:
    """Where the result goes: `out`, the run itself, or `attacks`; never among somebody's files."""
    given = _given(runs)
    _folders(given)  # refused before anything is written
    folder = Path(out) if out is not None else Path(given[0]) if len(given) == 1 else SEVERAL_RUNS
    if folder.is_file():
        raise UsageError(f"{folder} is a file. Name a folder for the page: --out DIR")
    if names_in(folder) and not (folder in map(Path, given) or _is_result(folder / RESULT)):
        raise UsageError(
            f"{folder} holds other files, and the result would be mixed among them. Give --out a new or empty folder."
        )
    return folder


def _is_result(path: Path) -> bool:
    try:
        return {"format", "runs"} <= read_json(path).keys()
    except (OSError, DamagedError, AttributeError):
        return False


def _given(runs: Runs) -> list[str | Path]:
    return [runs] if isinstance(runs, str | Path) else list(runs)


# What a gate may ask for of each run: accuracy of the main task, and 1 - X of the strongest attacker.
FIGURES: Known = dict.fromkeys(("accuracy", "privacy"))


def gated(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each run, by its name, as gates name them."""
    figures = {}
    for one in results:
        strongest = (one["privacy"] or {}).get("strongest") or {"all": {"value": None}}
        privacy, accuracy = strongest["all"]["value"], one["main"]["all"]["value"]
        figures[one["run"]] = {"accuracy": accuracy, "privacy": privacy}
    return figures


def attack_runs(
    runs: Runs, out: Path, *, again: bool = False, device: str = "auto", **settings: Any
) -> AttackReport:
    """Attack the vectors of one run or several.

    `settings` are those of AttackSettings and EncodingOptions. The figures of each run are kept in
    RUN/attack.json and taken from there when the same is asked again, unless `again`. `out` is the
    folder of the report.
    """
    sklearn_part("linear_model")  # refused here, not after an hour of encoding
    known = {name: value for name, value in settings.items() if value is not None}
    asked, options = split_settings(known, AttackSettings, EncodingOptions)
    encoding = {"batch_size": options.batch_size, "device": usable_device(device)}
    folders = _folders(_given(runs))
    for folder, _ in folders:
        _pair(folder)  # refused before the first of them is encoded
    results, num_kept = [], 0
    for folder, group in folders:
        with claimed(folder):
            kept = None if again else _kept(folder, asked)
            num_kept += kept is not None
            result = kept or _attacked(folder, asked, encoding)
        name = f"{group}/{folder.name}" if group else folder.name or str(folder)
        results.append({**result, "run": name, "group": group})
    return AttackReport(results=results, folder=out, num_kept=num_kept)


def _folders(given: Sequence[str | Path]) -> list[tuple[Path, str | None]]:
    """Each run's folder; a folder of several seeds stands for all of them, as one group."""
    folders: list[tuple[Path, str | None]] = []
    for path in map(Path, given):
        if (path / "summary.json").is_file() and not (path / CONFIG).is_file():
            seeds = sorted(path.glob("seed-*"), key=lambda seed: (len(seed.name), seed.name))
            folders += [(seed, path.name or str(path)) for seed in seeds]
        else:
            folders.append((path, None))
    if not folders:
        raise UsageError("No run was given. Name at least one: tightlip represent attack RUN")
    if len({folder.resolve() for folder, _ in folders}) < len(folders):
        raise UsageError("The same run is given twice. Name each once.")
    for folder, _ in folders:
        if not all((folder / half).is_dir() for half in (DEVICE, SERVER)):
            raise UsageError(
                f"{folder} holds no finished run with both halves (device and server). "
                f"Run: tightlip represent train CORPUS --out {folder}"
            )
    return folders


def _pair(folder: Path) -> str:
    """The training that both halves come from."""
    device, server = (str(read_half(folder / half, half)["pair"]) for half in (DEVICE, SERVER))
    if device != server:
        raise UsageError(
            f"The halves in {folder} come from two trainings: the device belongs to the pair {device}, and the server to "
            f"{server}. Attack the folder that one `tightlip represent train` wrote."
        )
    return device


# What is kept
def _question(asked: AttackSettings) -> dict[str, Any]:
    """What changes the figures; kept with them, so that the same question is not asked twice."""
    names = Path(asked.entities) if asked.entities else None
    digest = digest_of_files([names]) if names and names.is_file() else None
    settings = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(asked).items()}
    return {**settings, "entities_digest": digest}


def _kept(folder: Path, asked: AttackSettings) -> dict[str, Any] | None:
    """The figures already there, if they answer the same question about the same halves."""
    path = folder / RESULT
    if not path.is_file():
        return None
    listed(folder)  # damaged, it would refuse the result after hours
    try:
        written = read_json(path)
        (result,) = written["runs"]
        same = result["asked"] == _question(asked) and result["pair"] == _pair(folder)
        return _without_chosen_gaps(result) if same and written["format"] == FORMAT else None
    except (DamagedError, ValueError, KeyError, TypeError):
        return None  # another version's, or damaged: measured again


def _without_chosen_gaps(result: dict[str, Any]) -> dict[str, Any]:
    """Figures as an earlier version kept them, less the intervals of gaps between chosen groups."""
    for figures in result["fairness"].values():
        if len(figures["groups"]) > 2:
            figures["gap"] |= {"low": None, "high": None}
    return result


# One run
def _attacked(folder: Path, asked: AttackSettings, encoding: Encoding) -> dict[str, Any]:
    examples, device = load_examples(folder), load_device(folder / DEVICE)
    settings = _with_what_varies(asked, device)
    given, entities_from = attack_input(folder, examples, device, settings, encoding)
    figures = attack(given, settings, device=encoding["device"])
    result = {
        **_about(folder, device),
        "asked": _question(asked),
        "pair": device.pair,
        "releases": _cost(settings, device),
        "entities_from": entities_from,
        **_plain(figures),
    }
    result |= _about_rows(examples, result)
    kept = {**result, "run": folder.name, "group": None}
    write_json(folder / RESULT, {"format": FORMAT, "version": __version__, "runs": [kept]})
    return result


def attack_input(
    run: Path, examples: Examples, device: Device, settings: AttackSettings, encoding: Encoding
) -> tuple[AttackInput, str | None]:
    """The run as arrays, and where the names in its texts come from."""
    parts = parts_of_run(examples)
    targets, listing = what_to_read(run, examples, parts, settings.attributes)
    source = settings.entities or listing
    entities = None if source is None else entities_of(run, examples, parts, source)
    if not targets and entities is None:
        raise UsageError(
            f"{run} has no private columns, so there is nothing to read. Name some: --attributes, or --entities."
        )
    releases, bare = _vectors(examples, parts, device, settings.copies, encoding)
    right, plain = _main_task(run, examples, parts, releases)
    users = users_of(examples)
    given = AttackInput(
        releases=releases,
        bare=bare,
        targets=targets,
        entities=entities,
        users=[users[place] for place in parts.test],
        seen=examples.seen_in_train(),
        main_right=right,
        main_plain=plain,
    )
    return given, source


def _vectors(
    examples: Examples, parts: Arrays, device: Device, copies: int, encoding: Encoding
) -> tuple[Releases, Arrays]:
    """Fresh releases as an eavesdropper hears them, and the normalised vectors before noise."""
    raw = device.extractor.encode(examples.texts, **encoding)
    release = partial(device.encode, examples.texts, **encoding)
    if not device.mechanism.dropout:
        # Without masked words every release begins with the same vectors; only noise is fresh.
        release = partial(released, raw, device.mechanism, GridNoise())
    releases = released_afresh(release, parts, copies=copies)
    bare = normalised(raw, device.mechanism).astype("float32")
    return releases, parts.map(bare.__getitem__)


def _main_task(
    run: Path, examples: Examples, parts: Arrays, releases: Releases
) -> tuple[np.ndarray, np.ndarray]:
    """Whether the server, and whether the commonest training label, is right on each test text."""
    guessed, _ = load_server(run / SERVER).classify(releases.single.test)
    label = examples.label
    commonest = np.bincount(label.ids[parts.train]).argmax()
    truth = label.ids[parts.test]
    right = [label.names[one] == name for one, name in zip(truth, guessed, strict=True)]
    return np.array(right), truth == commonest


def parts_of_run(examples: Examples) -> Arrays:
    """The places of each part among the examples."""
    return Parts(**{name: np.flatnonzero(examples.parts == name) for name in PARTS})


def users_of(examples: Examples) -> list[str]:
    """Whose each text is; without users each text is somebody's own."""
    return examples.users or [str(row) for row in examples.rows]


def released_afresh(release: Callable[[], np.ndarray], parts: Arrays, *, copies: int) -> Releases:
    """One release of every text, and the mean of `copies` of them, the first among these."""
    with task("Releases", copies) as bar:
        single = release()
        bar.advance()
        total = single.astype(np.float64)
        for _ in range(copies - 1):
            total += release()
            bar.advance()
    mean = (total / copies).astype(np.float32)
    return Releases(single=parts.map(single.__getitem__), averaged=parts.map(mean.__getitem__))


def what_to_read(
    run: Path, examples: Examples, parts: Arrays, attributes: Sequence[str] | None
) -> tuple[list[Target], str | None]:
    """The private attributes: the run's own, or those named, which may be any column.

    One whose cells are lists of ids is no attribute: it comes back as a source of entities.
    """
    wanted = list(examples.private) if attributes is None else list(dict.fromkeys(attributes))
    others = [name for name in wanted if name not in examples.private]
    columns = columns_of_run(run, others, examples)
    listing = [name for name, cells in columns.items() if is_listing(cells)]
    if len(listing) > 1:
        raise UsageError(
            f"{' and '.join(listing)} both list ids in each text. Attack one of them at a time."
        )
    targets = [
        target_of(name, examples.private.get(name) or categories(columns[name], name), parts)
        for name in wanted
        if name not in listing
    ]
    return targets, COLUMN + listing[0] if listing else None


def _with_what_varies(settings: AttackSettings, device: Device) -> AttackSettings:
    """Releases that are all the same leave nothing to average."""
    if device.mechanism.mechanism != BARE or device.mechanism.dropout:
        return settings
    others = tuple(name for name in settings.attackers if name != "averaged")
    return replace(settings, attackers=others, copies=1)


def _about(folder: Path, device: Device) -> dict[str, Any]:
    tree, mechanism = read_toml(folder / CONFIG)["represent"], device.mechanism
    names = ("mechanism", "epsilon", "dropout", "dimensions")
    return {
        "method": tree.get("method", "dpnr"),
        **{name: getattr(mechanism, name) for name in names},
        "extractor": Path(tree.get("extractor", "lstm")).name,
        "label": tree["label"],
        "training_seed": tree.get("seed", 0),
        "guarantee": mechanism.record(),
    }


def _cost(settings: AttackSettings, device: Device) -> dict[str, Any] | None:
    """What the releases that are averaged cost together; null where none are."""
    if "averaged" not in settings.attackers:
        return None
    cost = cost_record(device.mechanism, settings.copies)
    if not math.isfinite(cost["epsilon"]):
        cost |= dict.fromkeys(("epsilon", "delta", "any_two_texts"))
    names = ("epsilon", "delta", "how", "any_two_texts")
    return {"num": settings.copies, **{name: cost[name] for name in names}}


def _about_rows(examples: Examples, result: dict[str, Any]) -> dict[str, Any]:
    has_users = examples.users is not None
    known = int(examples.in_train(examples.users).sum()) if examples.users else 0
    return {
        "num_train": int((examples.parts == "train").sum()),
        "num_dev": int((examples.parts == "dev").sum()),
        "has_users": has_users,
        "num_test_of_known_users": known,
        "notes": list(_notes(result, has_users, known)),
    }


def _notes(result: dict[str, Any], has_users: bool, known: int) -> Iterator[str]:
    """What to keep in mind, in sentences."""
    if not has_users:
        yield (
            "The corpus has no users, so each row is taken for an independent piece; if some people wrote several, the "
            "intervals are too short."
        )
    elif result["num_test_users"] < FEW_USERS:
        yield f"{result['num_test_users']} test users are few: the intervals are rough."
    if known:
        yield (
            f"{known:,} of {result['num_test']:,} test texts are by people who have training texts too, so an attacker may "
            "know the author rather than the attribute. Train with --split user to rule that out."
        )
    if result["num_seen_in_train"]:
        yield (
            f"{result['num_seen_in_train']:,} of {result['num_test']:,} test texts also stand in the training part, where "
            "attackers and classifier have seen them; figures without them stand beside."
        )
    if left_out := (result["entities"] or {}).get("num_left_out"):
        yield f"{left_out:,} of the names given are too rare in the training part to learn."


def _plain(value: Any) -> Any:
    """The same without numbers that JSON has no word for: what is not known is null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
