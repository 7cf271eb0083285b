# The README's commands. Each installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread each, or the workers fight over the cores. Three for two cores: one of them mostly waits for
# a command that it started; a fourth gained nothing. What is compiled is kept, also where the environment
# says otherwise: each worker would rewrite every test's asserts anew, and each command that is started
# compile all of tightlip.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

.PHONY: install demo test lint check faults fuzz bench bench-gpu
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"tightlip needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: install
	$(BIN)/tightlip demo

test: install
	tools/ensure-chromium
	$(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What to run while working: make test minus whole commands, trainings, kills and the browser.
check: lint
	$(PYTEST) -m 'not slow'

# What make test tries a sample of: 20 kills of each command, every file damaged in five ways, full
# disks, hostile files, whole processes traced. It ends with a table of what held.
faults: install
	TIGHTLIP_FAULTS=all $(PYTEST) tests/faults

# Damaged files for every reader, until interrupted.
fuzz: install
	$(BIN)/python tests/faults/fuzz.py

bench: install
	$(BIN)/python benchmarks/counting.py
	$(BIN)/python benchmarks/scan.py --device cpu
	$(BIN)/python benchmarks/exposure.py --device cpu
	$(BIN)/python benchmarks/dp_step.py --device cpu
	$(BIN)/python benchmarks/regularizers.py --device cpu

bench-gpu: install
	$(BIN)/python benchmarks/check_gpu.py --processes 4
	$(BIN)/python benchmarks/dp_step.py --device cuda --side-by-side --write docs/benchmarks.md
	$(BIN)/python benchmarks/scan.py --device cuda
	$(BIN)/python benchmarks/exposure.py --device cuda
	$(BIN)/python benchmarks/regularizers.py --device cuda
