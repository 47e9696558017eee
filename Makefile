# Everything runs from the project's own .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
CLIENTS := .venv-clients
MODEL ?= smollm2
PORT ?= 8000
# Tests start hundreds of processes: without bytecode each of them would compile the project's modules again.
PARALLEL := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal
# Sparse attention beyond the first thousand tokens on every device, so that the page map has something to show.
FLAGS_smollm2 := --attention-backend hsa --hsa-policy spread --hsa-dense-below 1024 --chunked-prefill-size 256 --demo --request-log off

.PHONY: help run chat test test-all test-sglang test-clients lint clean

help:
	@echo "make run       set up and serve a model, with a web page (MODEL=folder, .gguf, hub id or name)"
	@echo "make chat      set up and talk to a model in the terminal"
	@echo "make test      set up, lint, type-check and test (about six minutes on two cores)"
	@echo "make test-all  the same with the long suites and more examples, and make test-sglang"
	@echo "make lint      the linter and the type checker alone"
	@echo "make clean     remove what was set up"
	@echo "make test-clients  set up other people's clients in an environment of their own, and drive the server with them"
	@echo "make test-sglang  set up stock SGLang in an environment of its own, and test the plug-in in it"

# One stamp for what serving needs, and one for that and the tools of `make test`.
$(VENV)/serving: EXTRAS := server,grammar
$(VENV)/testing: EXTRAS := dev
$(VENV)/serving $(VENV)/testing: pyproject.toml
	@test -d $(VENV) || echo "Setting up $(VENV). Most of it is torch, which on Linux brings its CUDA libraries. To do" \
	    "without them: make run PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --editable ".[$(EXTRAS)]"
	@touch $@

run: $(VENV)/serving
ifeq ($(MODEL),smollm2)
	@$(BIN)/cairn pull smollm2 >/dev/null
endif
	$(BIN)/cairn serve --model "$(MODEL)" --port $(PORT) $(FLAGS_$(MODEL))

chat: $(VENV)/serving
	@$(BIN)/cairn chat --model "$(MODEL)"

lint: $(VENV)/testing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PARALLEL) -m "not slow"

test-all: lint
	HYPOTHESIS_PROFILE=thorough $(PARALLEL) -m "not slow"
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m slow
	$(MAKE) test-sglang

$(SGLANG)/installed: pyproject.toml tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --requirement tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.15
	$(SGLANG)/bin/python -m pip install --quiet --editable .
	touch $@

test-sglang: $(SGLANG)/installed
	$(SGLANG)/bin/python -m pytest tests/sglang

# Other people's clients against the server, in an environment of their own. npm is optional.
$(CLIENTS)/installed: pyproject.toml tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --editable ".[dev]" --requirement tests/clients/requirements.txt
	if command -v npm >/dev/null; then cd tests/clients && npm install --silent --no-package-lock; fi
	touch $@

test-clients: $(CLIENTS)/installed
	$(CLIENTS)/bin/python -m pytest tests/clients

clean:
	rm -rf $(VENV) $(SGLANG) $(CLIENTS) tests/clients/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
