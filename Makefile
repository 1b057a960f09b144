PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test fuzz check attack endurance package coverage figures clean

venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

demo: venv
	$(BIN)/polarprune demo --out runs/demo

# One thread per worker: two workers share two cores without fighting for them. Each gets half of the
# tests in their order, so that tests of one network share its trace, and takes from the other later.
# Bytecode is kept, also where the environment forbids it: the commands that tests start import a lot.
# glibc keeps the memory that was freed, because tests allocate tensors of the same sizes again.
test: export MALLOC_TRIM_THRESHOLD_ = 2000000000
test: export MALLOC_MMAP_THRESHOLD_ = 2000000000
test: venv
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

# Random networks, traced, cut, trained, exported and compared; failures are printed as small classes.
fuzz: venv
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.helpers.fuzz --networks 2000 --jobs 2 --shrink

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Forged and damaged files against `load`, under an audit hook; a few hundred run in the tests.
attack: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.attack --count 10000

# Trainings that are killed, find the disk full or diverge, and go on; a few run in the tests.
endurance: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.endurance --trials 50

# A wheel and a source distribution, each installed alone and tried.
package: venv
	$(BIN)/python -m tests.helpers.package

# Models of other packages, two at a time, each in its own process; resumes where it stopped.
coverage: venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,coverage]"
	$(BIN)/python -m benchmarks.measure.model_coverage
	$(BIN)/python -m benchmarks.pages.coverage_page

# Figures, docs/results.md, docs/performance.md and a table of docs/transformers.md, from results/ and benchmarks/numbers/.
figures: venv
	$(BIN)/python -m benchmarks.pages.figures
	$(BIN)/python -m benchmarks.pages.steering
	$(BIN)/python -m benchmarks.pages.worth
	$(BIN)/python -m benchmarks.pages.results
	$(BIN)/python -m benchmarks.pages.performance
	$(BIN)/python -m benchmarks.pages.transformers_page

# Leaves .venv and runs/ alone.
clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
