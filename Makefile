# Everything runs in an environment of its own under .venv; what needs Flower, in one under .venv-flower.
PYTHON ?= python3
BIN := .venv/bin
FLOWER := .venv-flower/bin
QUICK := tests/core tests/methods tests/models tests/data tests/analysis tests/test_house.py  # the pure parts

.PHONY: demo quick test test-flower slow wheel check audit chaos docs docs-version bench clean

demo: .venv/installed
	$(BIN)/coterie demo

quick: .venv/dev  # unit tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(QUICK) \
		-m 'not (long or slow or network or browser or ray or gpu or wheel or flower)'

test: .venv/dev  # in two processes, each with one thread
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-flower: .venv-flower/dev  # Flower's libraries are old ones, so they do not go with ours
	$(FLOWER)/python -m pytest tests/deploy/test_flower.py -m 'flower and not slow'

slow: .venv/dev  # minutes of training on real data
	$(BIN)/python -m pytest -m 'slow and not flower' -s

wheel: .venv/dev  # builds it, installs it in an empty environment, runs the demo there
	$(BIN)/python -m pytest -m wheel

check: .venv/dev  # ruff's S rules are those of bandit; every exception is explained where it is made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.ledger --check
	$(BIN)/python -m tools.adapters --check
	$(BIN)/python -m tools.tasks --check

audit: .venv/dev  # asks an advisory service on the internet; --strict: a library that it cannot look up is a failure
	mkdir -p build
	$(BIN)/python -m pip install --quiet 'pip-audit>=2.7'
	$(BIN)/python -m pip freeze --exclude-editable > build/installed.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement build/installed.txt

chaos: .venv/dev  # attacks our own processes on this machine, about 25 minutes; figures of docs/security.md
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.chaos --page

docs-version: export PATH := $(CURDIR)/$(BIN):$(PATH)
docs-version: .venv/docs  # commits the site of this version to the branch gh-pages, next to those of earlier versions
	NO_MKDOCS_2_WARNING=1 VERSIONS_OF_DOCS=mike mike deploy --update-aliases \
		"$$(python -c 'from coterie.core.version import VERSION; print(VERSION)')" latest
	mike set-default --allow-undefined latest

docs: .venv/docs  # a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/dev
	$(BIN)/python -m benchmarks

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[dev]
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[docs]
	touch $@

.venv-flower/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-flower
	$(FLOWER)/python -m pip install --quiet --constraint constraints.txt --editable .[flower] pytest
	touch $@

clean:
	rm -rf .venv .venv-flower build dist runs
