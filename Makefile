# `make` alone prints what it can do. A machine with Python >= 3.11, pip and make is enough: the first target that
# needs the environment builds it in .venv, exactly as uv.lock says.

PYTHON ?= python3
PYTEST_ARGS ?=
# Most tests wait for processes. A file stays together: its tests share servers and workers.
JOBS ?= 3
VENV := .venv
STAMP := $(VENV)/.baton-stamp
# Without a uv on the PATH, one is put into .uv by pip: that works where `python3 -m venv` is missing, too.
UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)

.DEFAULT_GOAL := help

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP) ## build the environment in .venv from uv.lock

.PHONY: demo
demo: $(STAMP) ## watch agent tasks survive kill -9: no key, no Docker, one minute
	$(VENV)/bin/baton demo

.PHONY: drill
drill: $(STAMP) ## kill everything at random while 60 tasks run, then check every guarantee: two minutes
	$(VENV)/bin/baton drill --tasks 60 --turns 10 --workers 3 --seconds 30 --seed 2026

.PHONY: up
up: $(STAMP) ## run Redis, workers, sweeper and dashboard here until Ctrl-C
	$(VENV)/bin/baton up

.PHONY: test
test: $(STAMP) ## run all tests, with the coverage floor
	$(VENV)/bin/pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS) --cov

.PHONY: cov
cov: test ## all tests, then a coverage report in htmlcov/
	$(VENV)/bin/coverage html

.PHONY: lint
lint: $(STAMP) ## ruff, formatting, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

.PHONY: format
format: $(STAMP) ## format the code and mend what ruff can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: types
types: $(STAMP) ## mypy, strict
	$(VENV)/bin/mypy

.PHONY: check
check: lint types test ## lint, types and tests: what must pass before a commit

.PHONY: wheel
wheel: $(STAMP) $(UV) ## build the wheel into dist/
	$(UV) build --wheel --out-dir dist

.PHONY: clean
clean: ## remove the environment, caches and build results; data of `baton up` stays
	rm -rf $(VENV) .uv dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml uv.lock | $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Baton needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.13"; \
		exit 1; }
	@# Only a new environment is told which Python to use: naming one for an old environment could replace it.
	UV_PYTHON_DOWNLOADS=never $(UV) sync --quiet --locked $$([ -e $(VENV)/bin/python ] || echo --python $(PYTHON))
	@touch $@

.uv/bin/uv:
	@mkdir -p .uv && echo '*' > .uv/.gitignore
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target .uv uv
