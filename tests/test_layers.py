"""Text moves one way: each layer imports only from those before it."""

import ast
from pathlib import Path

import pytest

import tightlip

ROOT = Path(tightlip.__file__).parent
BELOW = {
    *("core", "corpus", "models", "privacy", "training", "audit", "representation"),
    *("report", "engines"),
}
MAY_IMPORT = {
    "core": set(),
    "corpus": {"core"},
    "models": {"core"},
    "privacy": {"core"},
    "training": {"core", "corpus", "models", "privacy"},
    "audit": {"core", "corpus", "models"},
    "representation": {"core", "corpus", "models", "privacy"},
    "report": {"core"},
    "engines": {"core"},
    "api": BELOW,
    "cli": {*BELOW, "api"},
}
# The audit package is also the call `tightlip.audit(...)`: docs/decisions/0005.
ALLOWED = {("audit/__init__.py", "api")}
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
            yield node.module


def layer_files():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if len(parts) > 1:
            yield parts[0], path


@pytest.mark.parametrize(("layer", "path"), layer_files(), ids=lambda value: str(value)[-40:])
def test_no_arrow_points_backwards(layer, path):
    place = str(path.relative_to(ROOT))
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "tightlip" or len(parts) == 1 or parts[1] == layer:
            continue
        assert parts[1] in MAY_IMPORT[layer] or (place, parts[1]) in ALLOWED, f"{place}: {name}"


@pytest.mark.parametrize("place", ["cli", "core", "__init__.py", "models/__init__.py"])
def test_help_needs_nothing_heavy(place):
    files = [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py")
    for path in files:
        heavy = {name.split(".")[0] for name in imports_of(path, top_only=True)} & HEAVY
        assert not heavy, f"{path}: {heavy}"


@pytest.mark.parametrize("name", ["scan.py", "scoring.py", "scanned.py"])
def test_scanning_runs_on_a_bare_gpu_image(name):
    used = {m.split(".")[0] for m in imports_of(ROOT / "audit" / name, top_only=True)}
    third_party = {m for m in used if m not in SCANNING_MAY_USE | {"tightlip"}}
    import sys

    assert third_party <= set(sys.stdlib_module_names)
