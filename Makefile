# Needs Python 3.11 or later, git and make. Everything else is installed into .venv.

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell python3.11 -c 'import venv, ensurepip' >/dev/null 2>&1 && echo python3.11 \
  || echo python3)
endif
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
NEW := .venv-new
NEW_INSTALLED := $(NEW)/installed
PIP := -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2

# A second Python, 3.12 or later, for the newest JAX: on the path, or among those of pyenv. A shim
# of pyenv may be there and not run, so each candidate is tried. `make test PYTHON_NEW=` skips this.
ifeq ($(origin PYTHON_NEW),undefined)
PYTHON_NEW := $(shell for p in python3.12 python3.13 python3.14 python3 \
  $(wildcard $(HOME)/.pyenv/versions/3.1[234].*/bin/python); do \
  "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 \
  && { echo "$$p"; break; }; done)
endif

.PHONY: help demo test lint check test-new soak bench docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 12

demo: $(INSTALLED)  ## train eight agents in one program: live table, saved runs, a plot
	$(PY) examples/ppo_seeds.py

test: lint check test-new  ## every check: lint, types, tests, tests on the newest JAX

lint: $(INSTALLED)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check: $(INSTALLED) lint  ## the tests, on Python 3.11 and JAX 0.10 if that is what .venv holds
	$(PY) -m pytest -q -n $(WORKERS)

soak: $(INSTALLED)  ## the kill tests, for longer: KILLS=2000
	LOX_KILLS=$(or $(KILLS),1000) $(PY) -m pytest -q -n $(WORKERS) tests/test_faults.py

bench: $(INSTALLED)  ## speed and memory, as ratios
	$(PY) $(PIP) -c constraints.txt -e '.[bench]'
	$(PY) benchmarks/run.py
	@if $(PY) -c 'import torch' 2>/dev/null; then \
	  for file in benchmarks/logix_*.py; do echo; echo "$$file"; $(PY) $$file || exit 1; done; fi

docs: $(INSTALLED)  ## write docs/reference.md from the docstrings
	$(PY) docs/build_reference.py

clean:  ## remove environments, caches and outputs
	rm -rf $(VENV) $(NEW) examples/out .lox build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "jaxlox needs Python 3.11 or later; set PYTHON=... (found: $(PYTHON))"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@# PyTorch comes first, and only where the pinned version is the one for CPUs.
	@if $(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	  echo "$(PY) $(PIP) -c constraints.txt torch"; $(PY) $(PIP) -c constraints.txt torch; fi
	$(PY) $(PIP) -c constraints.txt -e '.[test,demo]'
	$(PY) $(PIP) -c constraints.txt --no-deps google-tunix  # for a model of it alone
	@touch $@

ifeq ($(PYTHON_NEW),)
test-new:
	@echo "No Python 3.12 or later found: the tests on the newest JAX are left out."
	@echo "To run them, name one: make test PYTHON_NEW=/path/to/python3.12"
else
test-new: $(NEW_INSTALLED) check  ## the tests on the newest JAX, if a Python 3.12 is found
	$(NEW)/bin/python -m pytest -q -n $(WORKERS)

$(NEW_INSTALLED): pyproject.toml constraints-new.txt
	$(PYTHON_NEW) -m venv --clear $(NEW)
	$(NEW)/bin/python $(PIP) -c constraints-new.txt -e '.[test,demo]'
	$(NEW)/bin/python $(PIP) -c constraints-new.txt --no-deps google-tunix
	@touch $@
endif
