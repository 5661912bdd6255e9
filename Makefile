# make demo   the whole way on the shipped detector and generated images
# make test   style, types and tests
# Both set up .venv first; nothing else has to be installed.

PYTHON ?= python3
VENV   ?= .venv
# The CPU build is enough for the tests; any torch that is there already will do.
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/trtdet demo -o demo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Debian's python3 comes without ensurepip; virtualenv then does the same.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(PYTHON) -m virtualenv $(VENV); } || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv $(VENV); } || { \
	  echo "no virtual environment could be made: install python3-venv or virtualenv" >&2; exit 1; }

$(VENV)/.demo: $(BIN)/python setup.cfg
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[rtx]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[rtx,dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
