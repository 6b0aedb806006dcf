# Every target makes the virtual environment first where it is not there: nothing has to be done before.
# Needs make and python3 (3.11 or newer, with venv); no compiler. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
STAMP  := $(VENV)/.installed
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input --retries 5 --timeout 60
# Extra arguments for pytest: make test PYTEST_ARGS="-k wire -n 2"
PYTEST_ARGS ?=
CHECKED := src/leto_strategy src/hydra_plugins $(wildcard examples benchmarks)

# The command `leto` and the tools below are those of the environment, whatever else is installed.
export PATH := $(abspath $(BIN)):$(PATH)
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP

.DEFAULT_GOAL := help
.PHONY: help demo test lint format nightly gpu bench clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small GPT (on a GPU if there is one), kill it four times, compare with an undisturbed run
	@$(BIN)/python examples/demo.py

test: lint ## lint, then all tests but the nightly ones
	@echo "pytest: seed and skipped tests are printed; PYTEST_ARGS passes more arguments"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter
	@status=0; check() { echo "$$@"; "$$@" || status=1; }; \
	check ruff check . ; \
	check ruff format --check . ; \
	check mypy $(CHECKED) ; \
	check lint-imports ; \
	exit $$status

format: $(STAMP) ## let ruff format and fix what it can
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

nightly: $(STAMP) ## all tests, the long plans included (hours)
	@$(BIN)/python -m pytest --nightly $(PYTEST_ARGS)

gpu: $(STAMP) ## on a machine with a GPU: its tests, then runs that are killed there (8 minutes)
	@$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)
	@$(BIN)/python tests/gpu/matrix.py

bench: $(STAMP) ## recovery time, overhead, speed of the erasure code, exactness with lost pages, one JSON line each
	@$(BIN)/python benchmarks/recovery.py --json
	@$(BIN)/python benchmarks/overhead.py --json
	@$(BIN)/python benchmarks/parity.py --json
	@$(BIN)/python benchmarks/recovery_correctness.py --json

clean: ## remove caches, builds and what runs left behind; the environment stays
	@rm -rf build dist examples/out benchmarks/out outputs multirun lightning_logs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environment
	@rm -rf $(VENV) src/*.egg-info

# torch comes first: it is the large one, and the pinned release must be there before anything asks for a newer one.
# Nothing is built in isolation, so that the pinned setuptools builds what is built.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Leto needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) -V); one to two minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "python3 has no venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/pip || $(BIN)/python -m ensurepip --upgrade >/dev/null
	@start=$$(date +%s); \
	install() { \
	  for attempt in 1 2 3; do \
	    $(PIP) install --quiet --constraint constraints.txt "$$@" && return 0; \
	    echo "  attempt $$attempt failed"; sleep $$((5 * attempt)); \
	  done; return 1; \
	}; \
	echo "  1/3 build tools";                  install setuptools && \
	echo "  2/3 torch (the largest download)"; install torch && \
	echo "  3/3 Leto and everything else";     install --no-build-isolation --editable '.[dev]' && \
	echo "Installed in $$(( $$(date +%s) - start )) s" && touch $(STAMP)
