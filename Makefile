# make demo    set up .venv with torch and a few small packages, and watch RUM learn associative recall on the CPU
# make test    install the rest into .venv and run the tests
# make lint    format check, lint and types
# make docs    the documentation, in docs/_build/html, and results/tables.md with every run
# make pages   the generated tables and figures of README, docs and results, after new runs or timings
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt
TRAIN := $(VENV)/.train
READY := $(VENV)/.ready

.PHONY: demo test lint docs pages clean

demo: $(TRAIN)
	@$(PY) -m torchrum demo

test: $(READY)
	$(PY) -m pytest -q -n 2

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
	$(PY) benchmarks/compare_figure.py docs/figures
	$(PY) -m torchrum report --write README.md

# what the command line needs, and no more; the pinned torch keeps later packages from bringing another one
$(TRAIN): pyproject.toml constraints.txt
	@echo "Installing torch and a few small packages into $(VENV), once; about half a minute after the download."
	@$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	@$(INSTALL) --editable ".[train]"
	@touch $(TRAIN)

$(READY): $(TRAIN)
	$(INSTALL) pip==26.3
	$(INSTALL) --editable ".[train,export,sweep,tensorboard]" --group test --group lint --group docs
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
