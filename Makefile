# Two commands to know: `make demo` and `make test`. Both set up .venv on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCE := dist2 observability tests examples benchmarks
RANKS  ?= 4
EPOCHS ?= 30
HOLD   ?= 0
SECONDS_EACH ?= 60
WORKERS ?= 2

# What pip installs as torch. An index of CPU builds in PIP_EXTRA_INDEX_URL saves a large download.
TORCH  ?= torch==2.13.0

.PHONY: demo test test-all lint format docs fuzz clean wheel gpu-test gpu-bench

$(VENV)/.installed: pyproject.toml $(wildcard dist2/compiled/source/*.h dist2/compiled/source/*/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo --ranks $(RANKS) --epochs $(EPOCHS) --hold $(HOLD)

# Files of tests are shared out among WORKERS; those marked "alone" run one after another in the end.
test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# On a machine with a GPU, with the torch and cupy that PYTHON has: nothing is downloaded. Without a GPU the tests over
# the stub of NCCL run, and those of the GPU are skipped with the reason.
gpu-test:
	$(PYTHON) -m pytest -q tests/backends/nccl/test_library.py tests/backends/nccl/test_communicator.py tests/backends/nccl/test_streams_of_devices.py
	$(PYTHON) -m pytest -q tests/gpu

gpu-bench:
	$(PYTHON) benchmarks/nccl.py

# As test, with the exhaustive sweeps.
test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -m "" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/ruff format --check $(SOURCE)
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix $(SOURCE)
	$(BIN)/ruff format $(SOURCE)

# The documentation as a site, in site/; a warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# SECONDS_EACH for each decoder; make fuzz TARGETS="peer objects" for some.
fuzz: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	PYTHONPATH=tests $(BIN)/python -m fuzzing $(TARGETS) --seconds $(SECONDS_EACH)

wheel: $(VENV)/.installed
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz
