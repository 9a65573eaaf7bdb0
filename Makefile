# Two commands do all the set-up: `make demo` and `make test`. Both create .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types wheel clean

demo: $(VENV)/.installed
	$(BIN)/veca demo --out demo

test: $(VENV)/.installed
	$(BIN)/pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

wheel: $(VENV)/.installed
	$(BIN)/python -m build --wheel --outdir dist .

# The constraints file names the CPU build of torch: a plain `torch` would pull gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo
