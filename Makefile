# Everything runs in an environment of its own under .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow wheel check docs bench clean

demo: .venv/installed
	$(BIN)/coterie demo

test: .venv/dev
	$(BIN)/python -m pytest

slow: .venv/dev  # minutes of training on real data
	$(BIN)/python -m pytest -m slow -s

wheel: .venv/dev  # builds it, installs it in an empty environment, runs the demo there
	$(BIN)/python -m pytest -m wheel

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/coterie ledger --check

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

clean:
	rm -rf .venv build dist runs
