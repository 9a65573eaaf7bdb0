# Two commands do all the set-up: `make demo` and `make test`. Both create .venv the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test end-to-end test-all attack lint types docs results wheel release clean

demo: $(VENV)/.demo
	$(BIN)/veca demo --out demo

PYTEST = $(BIN)/pytest --numprocesses 2 --dist worksteal

# In under five minutes on two cores; its last line says what it leaves out.
test: $(VENV)/.installed
	$(PYTEST) -m 'not end_to_end'

# What starts many processes, browsers, services or long runs.
end-to-end: $(VENV)/.installed
	$(PYTEST) -m end_to_end

# Everything, as CI runs it.
test-all: test end-to-end

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# The site of docs/ in site/; a broken link or anchor is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Everything behind docs/results.md; what is done already is not done again.
# QUICK=1: a small version of every step, in under ten minutes, that leaves the pages alone.
results: $(VENV)/.installed
	$(BIN)/python tools/reproduce.py $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# Hostile images, weights, configurations, large images, command lines and requests, for MINUTES; then one table.
# ONLY=images SEED=123: one case again.
attack: $(VENV)/.installed
	cd tests && ../$(BIN)/python -m attack --minutes $(or $(MINUTES),6) $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(if $(FIRST),--first $(FIRST))

wheel: $(VENV)/.installed
	$(BIN)/python -m build --wheel --outdir dist .

release: $(VENV)/.installed
	$(BIN)/python tools/release.py

# The constraints file pins every version. Which build of torch 2.13.0 that is, CPU or CUDA, depends on your package index.
INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt --editable

# What a first look needs, and no more: a third of everything.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[demo]'
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $(VENV)/.demo $@

clean:
	rm -rf $(VENV) build dist site *.egg-info demo
