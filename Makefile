# Everything here makes its own virtual environment in .venv and needs nothing but Python 3.11 and pip.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: venv demo test test-slow lint mutants fuzz bench coverage gpu-evidence docs wheel clean

venv: .venv/.dev

.venv/.demo: pyproject.toml constraints.txt
	@echo "Creating a virtual environment in .venv ..."
	@$(PYTHON) -m venv .venv
	@echo "Installing dpvision and its dependencies into .venv (PyTorch is the largest; one to several minutes) ..."
	@$(PIP) -e '.[demo]'
	@echo "Compiling the C++ kernels for this processor (once; up to a minute) ..."
	@$(BIN)/python -c "from dpvision import kernels; print(kernels.reason() or 'The kernels are ready.')"
	@touch $@

.venv/.dev: .venv/.demo
	@echo "Installing the development tools into .venv ..."
	@$(PIP) -e '.[dev]'
	@touch $@

.venv/.docs: .venv/.demo
	@echo "Installing mkdocs into .venv ..."
	@$(PIP) -e '.[docs]'
	@touch $@

.venv/.dist: .venv/.demo
	@echo "Installing the tools that build and check wheels into .venv ..."
	@$(PIP) -e '.[dist]'
	@touch $@

demo: .venv/.demo
	@echo "Training on scikit-learn's digits with epsilon 3 (some seconds): dpvision train --recipe demo"
	@$(BIN)/dpvision train --recipe demo
	@echo
	@echo "Next: source .venv/bin/activate, then 'dpvision verify' with the run folder above, and docs/tutorial.md."

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

coverage: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.coverage --run

gpu-evidence: .venv/.dev
	$(BIN)/python -m benchmarks.gpu_evidence --device cuda

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site: open build/site/index.html, or, with search, python -m http.server -d build/site"

# A wheel for Linux on x86-64 with kernels, and the source distribution, in dist/. auditwheel checks what the kernels
# need of the system, and names the wheel after it.
wheel: .venv/.dist
	rm -rf build/wheel
	DPVISION_BUILD_KERNELS=1 $(BIN)/python -m build --outdir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --plat manylinux_2_28_x86_64 -w dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist/
	@ls -l dist

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
