# Everything runs in .venv, which `make setup` makes when it is missing or a requirement changed.
#
# On Linux without a GPU, PyPI's torch brings gigabytes of CUDA along. The CPU build is smaller:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
export TORCH_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --constraint constraints.txt
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml) contrib/toolbrain-hello/pyproject.toml
STAMP := $(VENV)/.installed
TOOLS := editables hatchling hypothesis mypy pytest pytest-timeout ruff

.PHONY: help setup demo test check format

help:
	@echo "make setup    .venv with everything editable (TORCH_INDEX=… for another build of torch)"
	@echo "make demo     train an agent on the embedded model and show what it learned"
	@echo "make test     all tests, the installation of wheels into a clean venv included"
	@echo "make check    ruff, its formatter, mypy"
	@echo "make format   let ruff format and mend"

setup: $(STAMP)

$(STAMP): $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("toolbrain needs Python 3.11 or newer, and %s is %d.%d; name another one: make setup PYTHON=python3.12" % ("$(PYTHON)", v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) $(TOOLS)
	$(PIP) --no-build-isolation $(foreach project,$(PROJECTS),--editable ./$(dir $(project)))
	@touch $@

demo: $(STAMP)
	$(PY) docs/examples/demo.py

test: $(STAMP)
	$(PY) -m pytest -m "not gpu" --timeout 900

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
