# From a fresh clone on a machine with Python 3.11 or newer:
#   make demo    the main job on real input        make test    what every change has to pass
# Both create .venv first; a second call installs nothing.

PYTHON ?= python3
TORCH := 2.13.0
# Each run of CI takes a part of what only test-all has, by the number of commits: after so many turns
# all of it was run, on the newest DeepSpeed and on every other one.
TURNS := 9
RELEASE_TURNS := 6
# Older than the environment's: a DeepSpeed that loses micro steps, and one that divides by them again.
OLDER := 0.18.2 0.18.3

BIN := .venv/bin
# Two workers, each with its own ranks, which wait for each other much of the time.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations 15
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_ACCELERATOR := cpu
export DS_BUILD_OPS := 0
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions
# The tests import from the environment, not from the caller's path.
unexport PYTHONPATH
unexport DEEPSPEED_TEST_RELEASE

.DEFAULT_GOAL := help
.PHONY: help demo example test test-all test-turn lint docs pages shapes install frameworks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.demo ## two losses over one ZeRO-3 forward, stock and patched
	$(BIN)/python -m examples.two_losses

example: .venv/.demo ## GradCache over two ranks, one gradient reduction a step
	$(BIN)/python -m examples.gradcache

# One after the other, also under make -j: two ranks and two cores.
test: install ## lint, and the quick tests, on the newest DeepSpeed: five minutes
	@$(MAKE) --no-print-directory lint
	TEST_RANKS_FORK=1 $(PYTEST) -m "not exhaustive"

test-turn: frameworks ## a part of what test-all adds, in turn: fifteen minutes
	$(PYTEST) --turn-of $(TURNS)
	TEST_RANKS_FORK=1 $(BIN)/python -m tools.releases run --turn-of $(RELEASE_TURNS) --within 120

test-all: frameworks ## lint, every test, and the core tests on every release: hours
	@$(MAKE) --no-print-directory lint
	$(PYTEST)
	$(BIN)/python -m tools.releases run --whole 0.18.2
	$(BIN)/python -m tools.releases record

lint: install ## ruff and mypy
	$(BIN)/ruff check --extend-exclude .releases .
	$(BIN)/ruff format --check --extend-exclude .releases .
	$(BIN)/mypy --strict ds_patches

docs: .venv/.docs ## the site, in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pages: install ## the generated parts of the pages in docs/
	$(BIN)/python -m tools.pages

shapes: install ## what the code looks like in each release, into ds_patches/core/shapes.json
	$(BIN)/python -m tools.releases shapes

install: .venv/.project ## .venv with torch, DeepSpeed, the project and its tools

frameworks: install ## what only test-all has: frameworks, and older releases in .releases
	$(BIN)/pip install --quiet --editable '.[frameworks]'
	$(BIN)/python -m tools.releases install $(OLDER)

# What an example needs; nothing of the tests.
.venv/.demo: pyproject.toml .venv/.torch
	@echo "== the project and the newest DeepSpeed"
	$(BIN)/pip install --quiet --editable '.[demo]'
	@touch $@

# MkDocs alone, without torch and DeepSpeed.
.venv/.docs: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@

.venv/.project: pyproject.toml .venv/.torch
	@echo "== the project, the newest DeepSpeed and the tools"
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

# torch first, so that nothing below chooses one.
.venv/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version; \
	    sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: " + v)'
	@echo "== .venv and torch $(TORCH)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==$(TORCH)
	@touch $@

clean: ## remove .venv, .releases, build and caches
	rm -rf .venv .releases build .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
