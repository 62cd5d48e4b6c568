# Everything a developer does, each from a fresh clone: `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types micro bench codecs convergence clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev: $(VENV)/ready
	$(INSTALL) -e '.[test,bench]'
	@touch $@

demo: $(VENV)/ready  ## train a small GPT on two ranks: DDP against commsched
	$(BIN)/python -m commsched.demo

test: $(VENV)/dev  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/dev  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/dev  ## check types
	$(BIN)/mypy

micro: $(VENV)/dev  ## time what runs between the hook and the wire
	$(BIN)/python -m pytest bench/micro.py --benchmark-columns=min,median,stddev

bench: $(VENV)/dev  ## measure step time against plain DDP on shaped links (root)
	$(BIN)/python bench/step_time.py $(ARGS)

codecs: $(VENV)/dev  ## time the codecs' kernels against plain torch
	$(BIN)/python bench/codecs.py $(ARGS)

convergence: $(VENV)/dev  ## train with every codec on a slow link (root)
	$(BIN)/python bench/convergence.py $(ARGS)

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
