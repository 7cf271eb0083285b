"""Text moves one way: each room imports only from those before it (HOUSE.md's table)."""

import ast
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

import tightlip

ROOT = Path(tightlip.__file__).parent
STAGES = {
    "core": set(),
    "corpus": {"core"},
    "models": {"core"},
    "privacy": {"core"},
    "scan": {"core", "corpus", "models"},
    "training": {"core", "corpus", "models", "privacy", "scan"},
    "audit": {"core", "corpus", "models", "scan"},
    "vectors": {"core", "corpus", "models", "privacy"},
    "report": {"core"},
    "guard": {"core", "models"},
    "engines": {"core"},
}
ON_TOP = {"commands", "trainer", "viewer"}
ANY = (
    ""  # a room that only shows when the program runs: f"tightlip.{room}", getattr(tightlip, name)
)
MAY_IMPORT = (
    STAGES
    | {room: {*STAGES, *ON_TOP} for room in ON_TOP}
    | {
        "cli": {*STAGES, *ON_TOP, "experiments", ANY},
        "experiments": {*STAGES, *ON_TOP},
        "__init__": {"models"},
        "__main__": {"cli"},
    }
)
# The audit package is also the call `tightlip.audit(...)`: docs/decisions/0005.
ALLOWED = {("audit/__init__.py", "commands")}
# What loads on first use must be named somewhere; only these two name rooms in strings.
LAZY_TABLES = {"__init__.py", "core/registry.py"}
MOST_LINES = {"commands.py": 250}
HEAVY = {
    *("torch", "transformers", "numba", "pyarrow", "pydivsufsort", "pandas", "datasets"),
    *("sklearn", "scipy", "onnx", "onnxruntime"),
}
SCANNING_MAY_USE = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "triton"}


def imports_of(source: str, place: str, *, top_only: bool = False):
    """The full name of everything imported; a relative import as seen from `place`."""
    tree = ast.parse(source)
    package = ("tightlip", *PurePosixPath(place).parent.parts)
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def read_from_package(source: str):
    """What is read from a name that stands for the whole package, ANY where that is passed on."""
    nodes = list(ast.walk(ast.parse(source)))
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    bound = {each.asname or "tightlip" for each in aliases if each.name == "tightlip"}
    bound |= {"tightlip" for each in aliases if each.name.startswith("tightlip.")}
    attributes = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in bound:
            yield f"tightlip.{attributes.get(id(node), ANY)}"


def rooms_in_strings(source: str):
    """Dotted names in string literals, whole ones and the beginnings of f-strings."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    for text in (node.value for node in constants if isinstance(node.value, str)):
        found = re.fullmatch(r"tightlip\.(\w*)[\w.:]*", text)
        if found and found[1] in {ANY, *MAY_IMPORT}:
            yield text


def target_of(name: str) -> str:
    """The room behind a name of the package: `tightlip.train` is in training."""
    first = name.split(".")[1]
    return tightlip._CALLS[first].split(".")[1] if first in tightlip._CALLS else first


def slips_in(source: str, place: str):
    """Every way in which a file at `place` breaks HOUSE.md's table."""
    room = PurePosixPath(place).parts[0].removesuffix(".py")
    if room not in MAY_IMPORT:
        yield f"{place}: there is no room {room!r} in HOUSE.md's table. Write its row, here too."
        return
    if len(source.splitlines()) > MOST_LINES.get(place, sys.maxsize):
        yield f"{place} has more than {MOST_LINES[place]} lines"
    imported = list(imports_of(source, place))
    if room == "report":
        yield from (f"{place} imports {n}" for n in imported if n.split(".")[0] == "torch")
    named = [("imports", n) for n in imported if n.startswith("tightlip.")]
    named += [("reads", name) for name in read_from_package(source)]
    if place not in LAZY_TABLES:
        named += [("names", name) for name in rooms_in_strings(source)]
    for how, name in named:
        target = target_of(name)
        # Below commands.py only its version is read from the bare package.
        rooms = set() if how == "reads" and room in STAGES else MAY_IMPORT[room] | {room}
        if target not in rooms | {"__version__"} and (place, target) not in ALLOWED:
            yield f"{place} {how} {name}"


def test_no_arrow_points_backwards():
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    assert [
        slip
        for place, path in files.items()
        for slip in slips_in(path.read_text(encoding="utf-8"), place)
    ] == []


def test_every_way_around_the_table_is_named():
    def slips(place: str, *lines: str) -> list[str]:
        return list(slips_in("\n".join(lines), place))

    assert slips("core/files.py", "from ..audit import membership") == [
        "core/files.py imports tightlip.audit.membership"
    ]
    assert slips("audit/groups.py", "from .. import training") == [
        "audit/groups.py imports tightlip.training"
    ]
    assert slips("audit/canaries/__init__.py", "from ...training import loop") == [
        "audit/canaries/__init__.py imports tightlip.training.loop"
    ]
    assert slips("audit/groups.py", "import tightlip", "tightlip.training.loop") == [
        "audit/groups.py reads tightlip.training"
    ]
    assert slips("audit/groups.py", "import tightlip as t", "t.train()") == [
        "audit/groups.py reads tightlip.train"
    ]
    assert slips("audit/groups.py", "import tightlip", "getattr(tightlip, name)") == [
        "audit/groups.py reads tightlip."
    ]
    assert slips("audit/groups.py", 'import_module("tightlip.training.loop")') == [
        "audit/groups.py names tightlip.training.loop"
    ]
    assert slips("audit/groups.py", 'import_module(f"tightlip.{room}.loop")') == [
        "audit/groups.py names tightlip."
    ]
    assert slips("core/files.py", 'TABLE = {"page": "tightlip.report.kit:Page"}') == [
        "core/files.py names tightlip.report.kit:Page"
    ]
    assert slips("report/kit/plots.py", "def draw():", "    import torch.nn") == [
        "report/kit/plots.py imports torch.nn"
    ]
    assert slips("report/kit/plots.py", "from torch import Tensor") == [
        "report/kit/plots.py imports torch.Tensor"
    ]
    assert slips("commands.py", "import tightlip", "tightlip.run_demo()") == [
        "commands.py reads tightlip.run_demo"
    ]
    assert slips("commands.py", "from tightlip.experiments import demo") == [
        "commands.py imports tightlip.experiments.demo"
    ]
    (unknown,) = slips("fresh/thing.py", "x = 1")
    assert "no room 'fresh' in HOUSE.md's table" in unknown
    assert slips("commands.py", *["x = 1"] * 251) == ["commands.py has more than 250 lines"]


def test_what_the_table_allows_is_not_named():
    for place, source in {
        "audit/groups.py": "import tightlip\nfrom . import settings\nprint(tightlip.__version__)",
        "core/registry.py": 'TABLE = {"page": "tightlip.report.kit:Page"}',
        "cli/experiments.py": "import tightlip\ntightlip.run_demo()",
        "audit/__init__.py": "from tightlip.commands import audit",
        "training/loop.py": '"""As tightlip.audit does."""\nfrom ..corpus import tokens',
        "commands.py": "\n" * 250,
    }.items():
        assert list(slips_in(source, place)) == []


def test_help_needs_nothing_heavy():
    program = f"""
import sys
import tightlip.cli.main
print(sorted({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", ["scanner.py", "scoring.py", "store.py"])
def test_scanning_runs_on_a_bare_gpu_image(name):
    place = f"scan/{name}"
    source = (ROOT / place).read_text(encoding="utf-8")
    used = {m.split(".")[0] for m in imports_of(source, place, top_only=True)}
    third_party = used - SCANNING_MAY_USE - {"tightlip"}
    assert third_party <= set(sys.stdlib_module_names)
