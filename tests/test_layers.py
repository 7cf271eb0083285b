"""Text moves one way: each room imports only from those before it (HOUSE.md's table)."""

import ast
import subprocess
import sys
from pathlib import Path

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
    "engines": {"core"},
}
MAY_IMPORT = STAGES | {
    "commands": {*STAGES},
    "cli": {*STAGES, "commands", "experiments"},
    "experiments": {*STAGES, "commands"},
}
# The audit package is also the call `tightlip.audit(...)`: docs/decisions/0005.
ALLOWED = {("audit/__init__.py", "commands")}
HEAVY = {
    *("torch", "transformers", "numba", "pyarrow", "pydivsufsort", "pandas", "datasets"),
    *("sklearn", "scipy", "onnx", "onnxruntime"),
}
SCANNING_MAY_USE = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "triton"}


def imports_of(path: Path, *, top_only: bool = False):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def backward_arrows():
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        room = place.parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package != "tightlip" or target in {room, "", "__version__"}:
                continue
            if target not in MAY_IMPORT[room] and (str(place), target) not in ALLOWED:
                yield f"{place} imports {name}"


def test_no_arrow_points_backwards():
    assert list(backward_arrows()) == []


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
    used = {m.split(".")[0] for m in imports_of(ROOT / "scan" / name, top_only=True)}
    third_party = used - SCANNING_MAY_USE - {"tightlip"}
    assert third_party <= set(sys.stdlib_module_names)
