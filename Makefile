# make train   sets up .venv, then trains the built-in default: about a minute
# make attack  attacks a served run with real processes: about 15 minutes; ray_folder.py needs root
# make test    sets up .venv with the developers' tools, then lint, types and all tests
PYTHON ?= python3
BIN := .venv/bin
BUILT := pyproject.toml constraints.txt src/heloco/outer/kernels/native.c src/heloco/wire/codes.c

.PHONY: train test test-long soak attack lint bench bench-cluster bench-gpu pictures setup setup-dev clean

train: setup
	$(BIN)/heloco train

# the outer steps and what is recorded of them must not depend on a C compiler
PORTABLE := tests/outer/test_outer_kernels.py tests/outer/test_outer_rules.py tests/outer/test_outer_state.py tests/outer/test_outer_refusals.py \
	tests/outer/test_outer_step.py tests/synchronizer tests/cluster/test_journaled_run.py \
	tests/cluster/test_gateway_runs.py::test_one_machine_over_https_computes_what_it_computes_here_to_the_bit

test: lint
	$(BIN)/pytest -m "not long" --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 30
	HELOCO_KERNELS=portable $(BIN)/pytest --numprocesses 2 --dist loadfile $(PORTABLE)

test-long: setup-dev
	$(BIN)/pytest -m long

soak: setup-dev
	cd tests && ../$(BIN)/python -m faults.run --per-hour 125 --minutes 60 --step-seconds 0.25

attack: setup-dev
	$(BIN)/python tests/attack/idle_connections.py
	$(BIN)/python tests/attack/sustained_flood.py
	$(BIN)/python tests/attack/sustained_flood.py --addresses-used 300
	$(BIN)/python tests/attack/pipelined.py
	$(BIN)/python tests/attack/herd.py
	$(BIN)/python tests/attack/exhausted.py
	$(BIN)/python tests/attack/ray_folder.py
	$(BIN)/python tests/attack/fuzz.py --requests 50000

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup-dev
	$(BIN)/python benchmarks/outer_step.py
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/simulation_overhead.py

# evaluations, checkpoints and viewers beside arrivals; memory; about three quarters of an hour, on a computer that does nothing else
bench-cluster: setup-dev
	$(BIN)/python benchmarks/many_machines.py
	$(BIN)/python benchmarks/arrival.py
	$(BIN)/python benchmarks/latency.py

bench-gpu: setup-dev
	$(BIN)/python benchmarks/outer_step_gpu.py
	$(BIN)/python benchmarks/stack_gpu.py
	$(BIN)/python benchmarks/inner_gpu.py --plain

pictures: setup-dev
	PICTURES=docs $(BIN)/pytest tests/browser/test_report_browser.py -k pictures

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "HeLoCo needs Python 3.11 or newer: make PYTHON=python3.11 …"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(BUILT)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/bin/python $(BUILT)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[data,dev]"
	@touch $@ .venv/installed

clean:
	rm -rf .venv build src/heloco.egg-info src/heloco/outer/kernels/_native* src/heloco/wire/_codes*
