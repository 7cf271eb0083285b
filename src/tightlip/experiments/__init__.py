"""What the experiments of `tightlip reproduce` share: a plan, a folder of its own, files of results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightlip import __version__
from tightlip.core.errors import UsageError
from tightlip.core.files import make_private_folder, read_json, write_json, write_text
from tightlip.core.registry import unknown
from tightlip.report.kit import write_page

PLAN = "experiment.json"


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """An experiment as written to its folder."""

    folder: Path
    result: dict[str, Any]
    page: Path


def scale_named(name: str, scales: Mapping[str, Any]) -> Any:
    """How large the experiment is to be."""
    if name not in scales:
        raise UsageError(unknown("scale", name, list(scales)))
    return scales[name]


def claim_folder(
    folder: Path, scale: Any, corpora: Sequence[Path], *, text: str | None, **own: Any
) -> Path:
    """A folder holds one experiment; another's runs in it would be taken for this one's.

    `text` is the digest of the corpora, `own` what else makes the experiment what it is.
    """
    names = [path.stem for path in corpora]
    if len(set(names)) < len(names):  # each corpus gets a folder of its name
        raise UsageError(f"Two of the corpora have one name ({', '.join(names)}). Rename a file.")
    size = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(scale).items()}
    plan = {"corpora": [path.name for path in corpora], "text": text, "scale": size, **own}
    plan["version"] = __version__
    path = make_private_folder(folder) / PLAN
    if not path.exists():
        write_json(path, plan)
    there = read_json(path)
    if other := [name for name in plan if there.get(name) != plan[name]]:
        raise UsageError(
            f"{folder} holds an experiment with another {', '.join(other)}. Give another --out, or delete it first."
        )
    return folder


def write_results(
    folder: Path, name: str, result: dict[str, Any], csv: str, *, page: str
) -> Reproduced:
    """NAME.json, NAME.csv and NAME.html, the page that is registered under `page`."""
    write_json(folder / f"{name}.json", result)
    write_text(folder / f"{name}.csv", csv)
    drawn = write_page(page, folder / f"{name}.html", result=result)
    return Reproduced(folder=folder, result=result, page=drawn)
