# Everything runs from the project's own .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
PROMPT ?= The capital of France is

.PHONY: help run test test-all lint clean

help:
	@echo "make run       set up and run a model (MODEL=folder or preset)"
	@echo "make test      set up, lint, type-check and test (under 10 minutes)"
	@echo "make test-all  the same with the long suites"

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

run: $(VENV)/installed
	$(BIN)/cairn doctor
ifneq ($(MODEL),)
	$(BIN)/cairn generate "$(PROMPT)" --model "$(MODEL)"
else
	@echo "No model was named: make run MODEL=/path/to/model"
endif

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
