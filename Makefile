# Everything here needs Python 3.11 or newer and make; the first run of a target creates .venv and installs what it needs.
#
#   make demo       watch a model train
#   make test       the whole test suite, docs and docstrings included
#   make help       the rest

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PARITY := .venv-parity
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEMO   := examples/demo.py
ARGS   ?=
SECONDS ?= 600

export PYTHONHASHSEED := 0
export PYTHONDONTWRITEBYTECODE :=  # tests start many programs, each of which would compile the library again

.PHONY: help demo test matrix tpu gpu fuzz torture parity conformance goldens lint format house bench figures docs serve notebooks examples distributed clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-all ## train a small model and show it learning (ARGS="--steps 500")
	@$(BIN)/python $(DEMO) $(ARGS)

test: $(VENV)/.ready-dev ## run every test (ARGS="tests/core -k partition")
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

matrix: ## run the tests on every supported Python and JAX this machine has (ARGS="--only 3.12/0.12 -- tests/core")
	@$(PYTHON) tools/matrix.py $(ARGS)

tpu: ## compile layers, models and recipes for TPUs that are not here (ARGS="--jax 0.12 -- -k pages")
	@$(PYTHON) tools/tpu.py $(ARGS)

gpu: ## run the tests on the GPU of this machine, with the Python and JAX installed here (ARGS="--part 2/6")
	@$(PYTHON) tools/gpu.py $(ARGS)

fuzz: $(VENV)/.ready-dev ## compare lifted with eager on random programs (SECONDS=600 ARGS="--start 1")
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

torture: $(VENV)/.ready-dev ## kill, damage and race checkpoints for half an hour (ARGS="--kills 10 --pairs 2")
	@PYTHONPATH=. JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -W ignore -m tests.torture.checkpoints $(ARGS)

parity: $(PARITY)/.ready ## compare published models with transformers, both ways (ARGS="llama gemma2 --cases 3")
	@JAX_PLATFORMS=cpu $(PARITY)/bin/python tools/parity.py $(ARGS)

conformance: $(PARITY)/.ready ## change every entry of every config, compare with transformers (ARGS="llama" or "--types")
	@JAX_PLATFORMS=cpu $(PARITY)/bin/python tools/conformance.py $(ARGS)

goldens: $(PARITY)/.ready ## write tests/models/golden again (ARGS="llama3 phi3")
	@$(PARITY)/bin/python tools/make_golden.py $(ARGS)

lint: $(VENV)/.ready-dev ## ruff (rules and formatting) and pyright
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/pyright --warnings

format: $(VENV)/.ready-dev ## apply what ruff can fix by itself
	@$(BIN)/ruff check --quiet --fix . && $(BIN)/ruff format --quiet .

house: $(VENV)/.ready-dev ## count files, lines, nouns and frames per call (ARGS="--against main")
	@$(BIN)/python tools/house.py $(ARGS)

bench: $(VENV)/.ready-dev ## one table of ratios against hand-written JAX and peers (ARGS="--quick --only train_step")
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m benchmarks $(ARGS)

figures: $(VENV)/.ready-dev ## write the stored figures of benchmarks into README and docs (ARGS=--check)
	@JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.figures $(ARGS) && $(BIN)/python tools/benchmark_bars.py $(ARGS)

docs: $(VENV)/.ready-dev ## build the guide into site/, warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: $(VENV)/.ready-dev ## show the guide at http://127.0.0.1:8000 and rebuild it on every change (ARGS="-a 127.0.0.1:9000")
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --quiet $(ARGS)

notebooks: $(VENV)/.ready-dev ## run the notebooks of the guide and store what they show (ARGS="sharding")
	@JAX_PLATFORMS=cpu PYTHONPATH=. $(BIN)/python tools/notebooks.py $(ARGS)

examples: $(VENV)/.ready-dev ## run every example at a small setting and print its final metric
	@$(BIN)/python examples/run_all.py $(ARGS)

distributed: $(VENV)/.ready-dev ## train on two processes, kill one, resume (ARGS="--smoke")
	@$(BIN)/python examples/distributed/rehearse.py $(ARGS)

clean: ## remove everything these targets made
	rm -rf $(VENV) $(PARITY) .matrix .tpu site dist build .pytest_cache .ruff_cache .hypothesis benchmarks/results examples/output
	find nnx tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# .ready-X says that the extras X of pyproject.toml are installed; it is older than pyproject.toml when they may not be.
$(VENV)/.ready-%: pyproject.toml | $(BIN)/python
	@echo "installing nnx[$*] into $(VENV) ..."
	@$(PIP) install --editable ".[$*]"
	@touch $@

# The reference that published models are compared with (torch, transformers) stays out of the environment of the tests.
$(PARITY)/.ready: pyproject.toml
	@echo "installing nnx[parity] into $(PARITY) ..."
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip --disable-pip-version-check --quiet install --editable ".[parity]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "NNX needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)
