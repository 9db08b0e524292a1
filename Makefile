# make demo | test | fuzz | bench NAME=… | build | docs | lint | clean
#
# Everything runs in one environment, .venv: `make demo` puts into it what the demo needs, `make test`
# adds what tests need. A package list that changes, or a source file, has only its part made again.
PYTHON ?= python3
# The ordinary wheel of torch brings gigabytes of CUDA along. A CPU build is smaller:
# make demo TORCH="torch==…+cpu"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find src -type f ! -name '*.so' ! -path '*/__pycache__/*') meson.build pyproject.toml

.PHONY: build ready demo test fuzz bench docs lint clean

.NOTPARALLEL:

build: $(VENV)/installed

# Both, for those who change bpsx.
ready: $(VENV)/tests build

# What the build and the demo need: tools, packages, torch.
$(VENV)/environment: requirements-demo.txt
	@echo 'making $(VENV) and installing what bpsx and its demo need: about a minute'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)' -r requirements-demo.txt
	@touch $@

# What tests, linters and benchmarks need besides. TensorFlow and MXNet come if they have a wheel
# for this Python.
$(VENV)/tests: $(VENV)/environment requirements-dev.txt tests/support/optional.py
	@echo 'installing what the tests need: a minute or two'
	$(PIP) -r requirements-dev.txt
	$(BIN)/python tests/support/optional.py
	@touch $@

$(VENV)/installed: $(VENV)/environment $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --force-reinstall \
		--config-settings=build-dir=$(VENV)/build .
	@touch $@

# meson-python looks for the tools on the path, so they have to be there.
$(VENV)/installed: export PATH := $(CURDIR)/$(BIN):$(PATH)

demo: build
	$(BIN)/bpsx-run --local --workers 2 --servers 1 $(BIN)/python examples/pytorch/digits.py

test: ready
	$(BIN)/python -m pytest -n 3 --dist worksteal

fuzz: ready
	$(BIN)/python -m pytest tests/cluster/test_fuzz.py --fuzz 10000000 -s

bench: ready
	$(BIN)/python -m bench $(NAME)

docs: build
	$(BIN)/python -c "from bpsx.config import reference; print(reference(), end='')" > docs/reference/options.md

lint: ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build
