# make demo | test | fuzz | bench NAME=… | build | docs | lint | clean
#
# Everything runs in one environment, .venv, which `make build` makes once; it is made again only when a source file changes.
PYTHON ?= python3
# Where the default wheel of torch brings gigabytes of CUDA along, name a CPU build: make demo TORCH="torch==…+cpu".
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find src -type f ! -name '*.so' ! -path '*/__pycache__/*') meson.build pyproject.toml

.PHONY: build demo test fuzz bench docs lint clean

build: $(VENV)/installed

# The environment: tools, test and demo packages, torch. Made again when the list of packages changes.
$(VENV)/environment: pyproject.toml requirements-dev.txt
	@echo 'making $(VENV) and installing what bpsx needs: about a minute'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -r requirements-dev.txt
	# MXNet asks for a NumPy below 2, and bpsx.mxnet has it work with what is there. One of those below 2 is for a test that it does with both.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'mxnet>=1.9.1,<2'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/numpy1 'numpy>=1.26,<2'
	@touch $@

$(VENV)/installed: $(VENV)/environment $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
		-Cbuild-dir=$(VENV)/build .
	@touch $@

# meson-python looks for the tools on the path, so they have to be there.
$(VENV)/installed: export PATH := $(CURDIR)/$(BIN):$(PATH)

demo: build
	$(BIN)/bpsx-run --local --workers 2 --servers 1 $(BIN)/python examples/pytorch/digits.py

test: build
	$(BIN)/python -m pytest -n 3 --dist worksteal

fuzz: build
	$(BIN)/python -m pytest tests/cluster/test_fuzz.py --fuzz 10000000 -s

bench: build
	$(BIN)/python -m bench $(NAME)

docs: build
	$(BIN)/python -c "from bpsx.config import reference; print(reference(), end='')" > docs/options.md

lint: build
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build
