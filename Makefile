# Everything here makes its own virtual environment in .venv and needs nothing but Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: venv demo test test-slow lint mutants bench clean

venv: .venv/.dev

.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.dev: .venv/.demo
	$(PIP) -e '.[dev]'
	@touch $@

demo: .venv/.demo
	$(BIN)/dpvision train --recipe demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow'

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

mutants: .venv/.dev
	$(BIN)/python -m tools.mutants

bench: .venv/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build *.egg-info src/*.egg-info
