# Streetcar's tasks. `make help` lists them.

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
# Two files at a time; whatever fills both cores by itself runs alone.
TWO := -n 2 --dist loadfile
SEED ?= 0
PYTHON ?= python3
STEPS ?= 1000000
FROM ?= 1001

.DEFAULT_GOAL := help
.PHONY: help setup demo check test gpu sim sim-long chaos clean

# $(call part,NAME,PATHS,BUDGET): one pytest run, then what it took of its budget in seconds.
define part
@echo "== tests: $(1) (budget $(3) s)"
@start=$$(date +%s); $(PYTEST) $(2); code=$$?; \
	echo "== $(1): $$(( $$(date +%s) - start )) s of $(3) s"; exit $$code
endef

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup:  ## environment, pinned packages, embedded model (quick when done)
	@scripts/setup

demo: setup  ## eight prompts at once through the whole mesh
	@$(BIN)/streetcar demo

check: setup  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## everything: check, then all tests
	$(call part,unit and properties,$(TWO) tests/unit tests/properties,60)
	$(call part,simulation,tests/simulation,120)
	$(call part,processes,$(TWO) -m "not model" tests/process,150)
	$(call part,processes with a model,-m model tests/process,150)
	$(call part,kernels and models,tests/kernels tests/models tests/gpu,120)

gpu:  ## what only a GPU can show, in six minutes, as gpu.json: make gpu PYTHON=python3 (torch, triton, numpy, safetensors)
	@$(PYTHON) tests/gpu/check_gpu.py --out gpu.json

sim: setup  ## replay one history of the simulator: make sim SEED=42
	@$(BIN)/streetcar sim faults --seed $(SEED)

sim-long: setup  ## a million steps of histories with faults, on two cores: make sim-long STEPS=n FROM=seed
	@$(BIN)/python -m services.simulator.long $(STEPS) $(FROM)

chaos: setup  ## the fault drill: 210 kills of real processes, 15 minutes (make chaos SEED=42)
	@$(BIN)/streetcar chaos run $(if $(filter-out 0,$(SEED)),--seed $(SEED))

clean:  ## remove the environment and all caches (models stay)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
