# Everything runs from the project's own .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
PROMPT ?= The capital of France is

.PHONY: help run test test-all lint clean

help:
	@echo "make run       set up and talk to a model (MODEL=folder, .gguf, hub id or name)"
	@echo "make test      set up, lint, type-check and test (under 10 minutes)"
	@echo "make test-all  the same with the long suites"

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

run: $(VENV)/installed
ifeq ($(MODEL),smollm2)
	@$(BIN)/cairn pull smollm2 >/dev/null
endif
	@if [ -t 0 ]; then \
		$(BIN)/cairn chat --model "$(MODEL)"; \
	else \
		printf '%s' "$(PROMPT)"; \
		$(BIN)/cairn generate "$(PROMPT)" --model "$(MODEL)" --max-tokens 32; \
	fi

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
