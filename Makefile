# make test    set up .venv and run the tests
# make demo    set up .venv and watch RUM learn associative recall on the CPU
# make lint    format check, lint and types
# make docs    the documentation, in docs/_build/html, and results/tables.md with every run
# make pages   the generated tables and figures of README, docs and results, after new runs or timings
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: test demo lint docs pages clean

test: $(READY)
	$(PY) -m pytest -q -n 2

demo: $(READY)
	$(PY) -m torchrum demo

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(READY)
	$(PY) -m torchrum table > results/tables.md
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

pages: $(READY)
	for page in docs/results.md docs/findings.md; do $(PY) -m torchrum table --write $$page || exit 1; done
	$(PY) -m torchrum figure all --write docs/figures.md
	$(PY) benchmarks/judge.py results/bench/gpu.json results/bench/cpu.json
	for suite in gpu cpu; do $(PY) -m torchrum bench --report results/bench/$$suite.json --write docs/benchmarks.md || exit 1; done
	$(PY) -m torchrum bench --report results/bench/gpu.json --plot docs/figures/bench_gpu.svg
	$(PY) -m torchrum report --write README.md

# torch comes first and exactly pinned, so that nothing that follows can bring another build
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet pip==26.3
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt torch
	$(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[train,export,sweep,tensorboard]" --group test --group lint --group docs
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
