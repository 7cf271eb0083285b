"""What the experiments of `tightlip reproduce` share: a folder belongs to one of them."""

from pathlib import Path
from typing import Any

from tightlip.core.errors import UsageError
from tightlip.core.files import read_json, write_json

PLAN = "experiment.json"


def claim_folder(folder: Path, plan: dict[str, Any]) -> None:
    """A folder holds one experiment; another's runs in it would be taken for this one's."""
    path = folder / PLAN
    if not path.exists():
        write_json(path, plan)
        return
    there = read_json(path)
    other = [name for name in plan if there.get(name) != plan[name]]
    if other:
        raise UsageError(
            f"{folder} holds an experiment with another {', '.join(other)}. Give another --out, or delete it first."
        )


def check_names(corpora: list[Path]) -> None:
    """Each corpus gets a folder of its name, so no two may share one."""
    names = [path.stem for path in corpora]
    if len(set(names)) < len(names):
        raise UsageError(f"Two of the corpora have one name ({', '.join(names)}). Rename a file.")
