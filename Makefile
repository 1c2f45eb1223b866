# make help lists what there is. Each makes .venv first; PYTHON and TORCH_INDEX_URL choose the interpreter and torch build.
PYTHON ?= python3
DELAY_MS ?= 25
CPU_INDEX := https://download.pytorch.org/whl/cpu
BIN := .venv/bin
STAMP := .venv/.installed
NPM_STAMP := tests/npm/node_modules/.package-lock.json

export DELAY_MS TORCH_INDEX_URL

.PHONY: help install demo check test test-all floors docs protos
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## .venv with everything that developers need

demo: $(STAMP) ## a swarm on this machine: a text streams, a table compares; DELAY_MS is each link's delay
	@$(BIN)/client demo

LINT = $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/typos && $(BIN)/mypy
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 --durations 25

check test test-all: export OMP_NUM_THREADS = 1
check test test-all: export PYTHONDONTWRITEBYTECODE =
check: $(STAMP) ## lint, spelling, types and the unit tests, among them the import levels: under a minute
	$(LINT)
	$(PYTEST) tests/unit

# TENTH=0 … 9 adds a tenth of the crossings, which are products of cases but for their diagonals.
test: $(STAMP) $(NPM_STAMP) ## lint, spelling, types and what a change needs of the tests
	$(LINT)
	$(PYTEST) $(if $(TENTH),--tenth $(TENTH),--core)

test-all: $(STAMP) $(NPM_STAMP) ## the same with all crossings, followed guides and homes behind routers
	$(LINT)
	$(PYTEST)

docs: $(STAMP) ## the documentation site, strictly, into site/
	$(BIN)/python -m tools.site

protos: $(STAMP) ## generate the wire messages from protos/ anew
	$(BIN)/python tools/protos.py

$(NPM_STAMP): tests/npm/package.json tests/npm/package-lock.json
	@npm ci --prefix tests/npm && touch $@ || echo "npm ci failed: tests with Node clients are skipped" >&2

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Canopy needs Python 3.11 or newer; $(PYTHON) is not. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	{ rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

# torch comes first, and by no hash: its build depends on the machine. Without an NVIDIA GPU it is PyTorch's CPU build
# (200 MB) and not the default one (gigabytes); where PyTorch's index cannot be reached, the ordinary index serves. A torch
# already there stays. All else is what the tests passed with, file by file.
$(STAMP): pyproject.toml setup.py constraints.txt requirements.lock | .venv/bin/python
	@set -e; pip="$(BIN)/python -m pip install --disable-pip-version-check"; torch="-c constraints.txt torch"; \
	$$pip --require-hashes --no-deps -r requirements.lock; \
	if $(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then :; \
	elif [ -n "$$TORCH_INDEX_URL" ]; then $$pip --no-deps --index-url "$$TORCH_INDEX_URL" $$torch; \
	elif command -v nvidia-smi >/dev/null; then $$pip $$torch; \
	else $$pip --no-deps --retries 0 --timeout 15 --index-url $(CPU_INDEX) $$torch || \
	  { echo "$(CPU_INDEX) did not answer: torch comes from the default index" >&2; $$pip $$torch; }; \
	fi; \
	$$pip --no-deps --no-build-isolation -e .
	@touch $@

# With the oldest versions that a user may have. PyTorch's oldest CPU build comes from its own index, or the newest here.
FLOORS := .floors
FLOOR_TOOLS := anthropic hypothesis openai pytest pytest-asyncio pytest-timeout pytest-xdist PyYAML schemathesis
FLOOR_TESTS := tests/unit/client tests/unit/node tests/unit/swarm tests/net/client/api --ignore tests/unit/swarm/compute/kernels --ignore tests/unit/swarm/protocol/test_generated.py

floors: export OMP_NUM_THREADS = 1
floors: ## the unit tests and the API's with the lowest versions that pyproject.toml admits
	@rm -rf $(FLOORS) && $(PYTHON) -m venv $(FLOORS)
	@set -e; pip="$(FLOORS)/bin/python -m pip install --disable-pip-version-check"; lowest=$(FLOORS)/floors.txt; \
	$$pip packaging; $(FLOORS)/bin/python -m tools.floors > $$lowest; \
	$$pip --no-deps --retries 0 --timeout 15 --index-url $(CPU_INDEX) "$$(grep ^torch== $$lowest)" || \
	  { echo "$(CPU_INDEX) did not answer: torch is not the lowest" >&2; sed -i /^torch==/d $$lowest; }; \
	$$pip -c $$lowest '.[all]' $(FLOOR_TOOLS)
	$(FLOORS)/bin/python -m pytest -n 2 --dist loadfile -p no:cacheprovider $(FLOOR_TESTS)
