# From a fresh clone on a machine with Python 3.10 or newer:
#   make demo    the main job on real input        make test    everything CI runs
# Both create .venv first; a second call installs nothing.

PYTHON ?= python3
TORCH := 2.13.0
# The core subset runs on each of these, the whole suite on the newest (extra "test").
RELEASES ?= 0.16.3 0.16.9 0.17.5 0.18.2 0.18.3 0.18.6 0.19.0 0.19.2
# Older than the environment's: their accumulate() calls the engine's no_sync().
ACCELERATE := accelerate==1.7.0 accelerate==1.8.1

BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_ACCELERATOR := cpu
export DS_BUILD_OPS := 0
# What the tests import is the environment's, whatever the caller's shell has on its path.
unexport PYTHONPATH
unexport DEEPSPEED_TEST_RELEASE

.DEFAULT_GOAL := help
.PHONY: help demo example test lint test-newest test-releases compatibility docs install accelerate releases clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## two losses over one ZeRO-3 forward, stock and patched
	$(BIN)/python -m demo

example: install ## GradCache over two ranks, one gradient reduction a step
	$(BIN)/python -m examples.gradcache

test: ## lint, docs, the whole suite on the newest DeepSpeed, the core subset on RELEASES
# One after the other, also under make -j: two ranks and two cores.
	@$(MAKE) --no-print-directory releases
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory test-newest
	@$(MAKE) --no-print-directory test-releases

lint: install ## ruff and mypy
	$(BIN)/ruff check --extend-exclude .releases .
	$(BIN)/ruff format --check --extend-exclude .releases .
	$(BIN)/mypy --strict ds_patches

docs: install ## the site, in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-newest: accelerate ## the whole suite on the newest DeepSpeed
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions $(BIN)/python -m pytest

test-releases: releases ## the core subset on RELEASES (RELEASES= skips)
	$(if $(strip $(RELEASES)),$(BIN)/python -m tests.releases run $(RELEASES))

compatibility: install ## every known DeepSpeed, into docs/compatibility.*; resumable
	$(BIN)/python -m tests.releases record

install: .venv/.project ## .venv with torch, DeepSpeed, the project and its tools

accelerate: install ## the older Accelerate releases, in .releases
	$(BIN)/python -m tests.releases install $(ACCELERATE)

releases: install ## the older DeepSpeed releases, in .releases
	$(if $(strip $(RELEASES)),$(BIN)/python -m tests.releases install $(RELEASES))

.venv/.project: pyproject.toml .venv/.torch
	@echo "== the project, the newest DeepSpeed and the tools"
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

# torch first, so that nothing below chooses one.
.venv/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version; \
	    sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: " + v)'
	@echo "== .venv and torch $(TORCH)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==$(TORCH)
	@touch $@

clean: ## remove .venv, .releases, build and caches
	rm -rf .venv .releases build .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
