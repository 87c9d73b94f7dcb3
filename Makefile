# Everything runs through .venv, which `make env` makes. `make help` lists the targets.
PRESET ?= demo
PORT ?= 5000
WORKERS ?= 2
CORES ?=
GPU_PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
python = .venv/bin/python
# For commands that call others by name. Not exported: the bootstrap must find the system's Python.
with_path = PATH="$$PWD/.venv/bin:$$PATH"

.DEFAULT_GOAL := help
.PHONY: help env test-env reproduce test soak lint ui lock snapshot take-over schemas bench gpu-check

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | sed 's/|/\t/' | expand -t 22
	@echo "variables: PRESET=demo|study|smoke|imagenet|tuning  CORES=n  PORT=5000  WORKERS=2 (tests at once)"
	@echo "           PYTHON=python3.12  TORCH_INDEX=URL  SYSTEM_PACKAGES=0  REQUIRE_FFCV=1  REQUIRE_EXTENSION=1"

env:  ## make or update .venv, the compiled operators and FFCV
	@tools/bootstrap.sh

test-env:
	@tools/bootstrap.sh --test

reproduce: env  ## everything: data, models, trainings, figures, tables and the claims ledger of PRESET
	@$(python) tools/reproduce.py --preset '$(PRESET)' $(if $(CORES),--cores '$(CORES)')

lint: test-env  ## style, types and the direction of the dependencies
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m snakefmt --check Snakefile workflow
	$(python) -m mypy
	.venv/bin/lint-imports

test: lint  ## the whole suite, with an end-to-end run of the preset smoke (ATTNGEO_ALLOW_SYSTEM_TESTS=1: on full and read-only disks, too)
	$(with_path) $(python) -m pytest -n '$(WORKERS)' -m 'not soak and not workflow'
	$(with_path) $(python) -m pytest -m 'workflow and not soak'

soak: test-env  ## the long trials; with ATTNGEO_ALLOW_SYSTEM_TESTS=1 also a real Slurm (which changes the machine)
	$(with_path) $(python) -m pytest -m soak

ui: env  ## MLflow on this machine alone, with a link that compares the trainings of PRESET
	@$(python) tools/ui.py --preset '$(PRESET)' --port '$(PORT)'

bench: env  ## time operators, training steps, image loaders, attention's flow, the connection walk and metrics against their peers on this CPU (30 minutes, on an idle machine)
	$(python) -m benchmarks.operators
	$(python) -m benchmarks.training_step
	$(python) -m benchmarks.loaders
	$(python) -m benchmarks.variational
	$(python) -m benchmarks.connection_walk
	$(python) -m benchmarks.fiber_bundle

gpu-check:  ## check and time the operators on this machine's GPU; needs torch, nvcc and g++ alone (GPU_PYTHON=python3)
	@$(GPU_PYTHON) tools/gpu_check.py

lock: test-env  ## write the lock files from what .venv holds
	$(python) tools/lock.py

snapshot: env  ## keep what PRESET made under docs/measured and refresh the README's tables (UNFINISHED=1: its records and answers so far)
	@$(python) tools/snapshot.py --preset '$(PRESET)' $(if $(UNFINISHED),--unfinished)

take-over: env  ## begin PRESET with the finished records in docs/measured that this code would make the same
	@$(python) tools/take_over.py --preset '$(PRESET)' $(if $(CORES),--cores '$(CORES)')

schemas: test-env  ## write workflow/schemas from the models in attngeo.config
	$(python) -c 'from pathlib import Path; from attngeo.config import write_schemas; write_schemas(Path("workflow/schemas"))'
