# Everything runs in an environment of its own under .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow check bench clean

demo: .venv/installed
	$(BIN)/coterie demo

test: .venv/dev
	$(BIN)/python -m pytest

slow: .venv/dev  # minutes of training on real data
	$(BIN)/python -m pytest -m slow -s

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev
	$(BIN)/python -m benchmarks

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[dev]
	touch $@

clean:
	rm -rf .venv build dist runs
