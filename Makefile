# Everything a developer does, each from a fresh clone: `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types bench bench-compare step-time
.PHONY: codecs collectives overlap engine convergence docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/dev: $(VENV)/ready
	$(INSTALL) -e '.[test,bench]'
	@touch $@

$(VENV)/docs: $(VENV)/ready
	$(INSTALL) -e '.[docs]'
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

bench: $(VENV)/dev  ## run the microbenchmarks, keep the result in bench/results/micro
	$(BIN)/python bench/kept.py keep $(ARGS)

bench-compare: $(VENV)/dev  ## run them beside the last kept run of this kind of machine
	$(BIN)/python bench/kept.py compare $(ARGS)

step-time: $(VENV)/dev  ## measure step time against plain DDP on shaped links (root)
	$(BIN)/python bench/step_time.py $(ARGS)

collectives: $(VENV)/dev  ## time collectives and exchanges on two ranks, as nccl-tests does
	$(TORCHRUN) bench/collectives.py $(ARGS)

overlap: $(VENV)/dev  ## how much communication hides behind computing, as OSU's tests say it
	$(TORCHRUN) bench/overlap.py $(ARGS)

engine: $(VENV)/dev  ## what the engine costs a chunk, beside bare c10d
	$(TORCHRUN) bench/engine.py $(ARGS)

codecs: $(VENV)/dev  ## time the codecs' kernels against plain torch
	$(BIN)/python bench/codecs.py $(ARGS)

convergence: $(VENV)/dev  ## train with every codec on a slow link (root)
	$(BIN)/python bench/convergence.py $(ARGS)

docs: $(VENV)/docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove everything that make made
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
