# Everything here makes its own virtual environment in .venv and needs nothing but Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: venv demo test test-slow lint mutants fuzz bench docs clean

venv: .venv/.dev

.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.dev: .venv/.demo
	$(PIP) -e '.[dev]'
	@touch $@

.venv/.docs: .venv/.demo
	$(PIP) -e '.[docs]'
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

fuzz: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/properties/test_fuzz.py -n 2 --hypothesis-profile=fuzz --hypothesis-show-statistics

bench: .venv/.dev
	$(BIN)/python -m benchmarks

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site: open build/site/index.html, or serve it with python -m http.server -d build/site"

clean:
	rm -rf .venv build *.egg-info src/*.egg-info
