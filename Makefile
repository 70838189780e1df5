# make demo: train NAM56R on this machine.   make test: the CPU suite, without the exhaustive tests.   Both set everything up first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The Python that makes the virtual environment; the environment itself lies outside of the clone (requirements/environment.py).
BASE_PYTHON ?= python3.12
export PYTHONPATH := $(CURDIR)
# Bytecode is kept, whatever the shell says: without it every process that a test starts compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Shell text that leaves the Python of the environment named by ENVIRONMENT (nothing: dev) in $$python.
ENVIRONMENT =
SETUP = "$(BASE_PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null || { \
	echo "Python 3.12 or later was not found as '$(BASE_PYTHON)': install it, or say make BASE_PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	python="$$("$(BASE_PYTHON)" requirements/environment.py $(ENVIRONMENT))"

.PHONY: help venv demo test cases dist test-install kernels test-bridge test-exhaustive test-newest test-upstream lint typecheck docs bridge nemo-run clean

help:
	@echo "make demo       set everything up, train nam56r_tiny, show the loss curve"
	@echo "make test       the CPU test suite (MEGATRON_LM=/path/to/Megatron-LM adds the tests on a checkout; MEGATRON=… runs all on it); FAST=1: under a minute"
	@echo "make cases      what people ran into elsewhere, each case a script (tests/cases)"
	@echo "make dist       the sdist, and the wheel built from it, in dist/"
	@echo "make test-install  that wheel in an environment of its own, which then trains two steps on the CPU"
	@echo "make kernels    the GPU kernels without a GPU: interpreted, and compiled for an H200 (nothing spilled, tensor cores used)"
	@echo "make test-bridge  the tests that need Megatron-Bridge or nemo-run, in environments with them"
	@echo "make test-exhaustive  every combination: patches by recompute, masks, schedules and layouts"
	@echo "make test-newest  the CPU suite and the kernels with the newest torch that pip installs (5 GB, removed at the end)"
	@echo "make test-upstream  Megatron's own unit tests with and without patches, on a GPU host"
	@echo "make lint       ruff, check and format; who imports whom"
	@echo "make typecheck  mypy"
	@echo "make docs       the documentation as a site, in build/docs"
	@echo "make venv       the virtual environment alone"
	@echo "make bridge     the virtual environment with Megatron-Bridge; prints its Python"
	@echo "make nemo-run   the virtual environment with nemo-run, which only submits; prints its Python"
	@echo "make clean      remove what builds and tests leave in the clone (runs/ is kept)"

venv:
	@$(SETUP); echo "$$python"

demo:
	@$(SETUP); exec "$$python" examples/demo.py

# FAST=1: what needs neither a training nor a kernel.
FAST_TESTS = $(addprefix tests/,arguments backends data model nemo_recipes policy repository/test_docs.py repository/test_house.py util)
# Files in the order of tests/conftest.py, the slow ones first; pytest-xdist's own puts those with the fewest tests last.
# MEGATRON=/path/to/Megatron-LM: with that Megatron in place of the wheel, also as the checkout.
test: ENVIRONMENT = $(if $(MEGATRON),megatron "$(MEGATRON)")
test:
	@$(SETUP); $(if $(MEGATRON),export MEGATRON_LM="$(abspath $(MEGATRON))";) exec "$$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 \
		-m "not gpu and not exhaustive and not kernels$(if $(FAST), and not slow)" $(if $(FAST),$(FAST_TESTS),tests --ignore=tests/gpu)

# What people ran into elsewhere, each a script that exits 0; CASES="02 06" chooses, NEEDS=1 adds those that need root or minutes.
cases:
	@$(SETUP); PYTHON="$$python" exec tests/cases/run.sh $(CASES)

dist:
	@$(SETUP); rm -rf dist; "$$python" -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null; \
	"$$python" -m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check --wheel-dir dist dist/*.tar.gz; ls dist

# With what pip brings today, in a temporary environment: no lock file, nothing of the clone on the path.
test-install: export PYTHONPATH =
test-install: export OMP_NUM_THREADS ?= 1
test-install: dist
	@folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; \
	"$(BASE_PYTHON)" -m venv "$$folder/venv"; "$$folder/venv/bin/pip" install --quiet --disable-pip-version-check dist/*.whl; \
	cd "$$folder"; PATH="$$folder/venv/bin:$$PATH"; megacpp-mcore doctor; megacpp-mcore data corpus --output corpus; \
	megacpp-mcore recipe emit nam56r_tiny --as args --data corpus/stdlib_train --train-iters 2 > arguments; mapfile -t words < arguments; \
	megacpp-mcore launch --device cpu -- "$${words[@]}"

# Triton keeps what it compiled, by source and version: the second time takes seconds.
kernels:
	@$(SETUP); exec "$$python" -m pytest -n 2 --dist worksteal -m kernels tests/ops/test_interpreted.py tests/ops

# Shell text that sets up the environments with Megatron-Bridge and nemo-run, too.
BRIDGE_SETUP = $(SETUP); export MEGACPP_BRIDGE_PYTHON MEGACPP_NEMO_RUN_PYTHON; \
	MEGACPP_BRIDGE_PYTHON="$$($(MAKE) --silent bridge)"; MEGACPP_NEMO_RUN_PYTHON="$$($(MAKE) --silent nemo-run)"

test-bridge:
	@$(BRIDGE_SETUP); exec "$$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "bridge and not exhaustive" tests/bridge tests/nemo

test-exhaustive:
	@$(BRIDGE_SETUP); exec "$$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "exhaustive and not gpu" tests

test-newest:
	@folder="$$(mktemp -d)"; trap 'rm -rf "$$folder"' EXIT; "$(BASE_PYTHON)" -m venv "$$folder/venv"; python="$$folder/venv/bin/python"; \
	"$$python" -m pip install --quiet --disable-pip-version-check ".[dev]"; \
	"$$python" -m pip list --disable-pip-version-check | grep -E '^(torch|triton|megatron-core) '; \
	"$$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not exhaustive" tests --ignore=tests/gpu

# With the host's own Python: the environment of this file has no Transformer Engine.
test-upstream:
	exec $(or $(PYTHON),python3) -m tests.upstream.run $(UPSTREAM)

lint:
	@$(SETUP); "$$python" -m ruff check . && "$$python" -m ruff format --check . && "$$(dirname "$$python")"/lint-imports

typecheck:
	@$(SETUP); exec "$$python" -m mypy

bridge nemo-run: ENVIRONMENT = $@
bridge nemo-run:
	@$(SETUP); echo "$$python"

# An environment of its own: small, without torch. Nothing is fetched while the site is built, and a warning is an error.
docs: ENVIRONMENT = docs
docs:
	@$(SETUP); NO_MKDOCS_2_WARNING=1 exec "$$python" -m mkdocs --quiet build --strict --clean

clean:
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
