# `make help` lists the targets.
#
# Everything runs in one environment, .venv: `make demo` puts into it what the demo needs, and
# `make test` adds what tests need. A package list that changes, or a source file, has only its part
# made again.
PYTHON ?= python3
# The ordinary wheel of torch brings gigabytes of CUDA along. A CPU build is smaller:
# make demo TORCH="torch==…+cpu"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find src -type f ! -name '*.so' ! -path '*/__pycache__/*') \
	meson.build pyproject.toml

.PHONY: build help ready demo quick test fuzz bench docs lint clean

.NOTPARALLEL:

build: $(VENV)/installed  ## compile bpsx and install it into .venv (the default)

# A target is listed if its line ends with two number signs and what it does.
help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS='|' read -r target does; do printf '%-8s%s\n' "$$target" "$$does"; done

ready: $(VENV)/tests build  ## build, and install what tests, linters and benchmarks need

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

demo: build  ## train on digits: two workers, a server and a scheduler on this machine
	$(BIN)/bpsx-run --local --workers 2 --servers 1 $(BIN)/python examples/pytorch/digits.py

quick: ready  ## run the tests that need no job: tests/unit and tests/source
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/unit tests/source

test: ready  ## run all tests: about 40 minutes on two cores
	$(BIN)/python -m pytest -n 3 --dist worksteal

fuzz: ready  ## send ten million mutated messages to a live server
	$(BIN)/python -m pytest tests/cluster/test_fuzz.py --fuzz 10000000 -s

bench: ready  ## measure: make bench NAME=push_pull; without NAME, list the benchmarks
	$(BIN)/python -m bench $(NAME)

docs: build  ## write docs/reference/options.md from the table of options
	$(BIN)/python -c "from bpsx.config import reference; print(reference(), end='')" \
		> docs/reference/options.md

lint: ready  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## delete .venv and build
	rm -rf $(VENV) build
