# Two commands to know: `make demo` and `make test`. Both set up .venv on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCE := dist2 observability tests examples benchmarks
RANKS  ?= 4
EPOCHS ?= 30
HOLD   ?= 0
SECONDS_EACH ?= 60
WORKERS ?= 4

TORCH  ?= torch==2.13.0
# Without a GPU, torch's build for CPUs is tried first: a much smaller download. pip finds it if a configured index has
# it (PIP_EXTRA_INDEX_URL). TORCH with a "+" in its version is installed as it is.
GPU    := $(wildcard /dev/nvidia0 /dev/kfd)
TORCH_CPU := $(if $(GPU)$(findstring +,$(TORCH)),,$(TORCH)+cpu)

# What the extensions are built from: setup.py.
COMPILED := $(shell find dist2 -name '*.[ch]' -o -name '*.pyx' -o -name '*.pxd')
COMPILED += $(wildcard $(patsubst %.pxd,%.py,$(filter %.pxd,$(COMPILED))))

.PHONY: core-test debug-test demo test test-all lint format docs fuzz clean wheel gpu-test gpu-bench

$(VENV)/.installed: pyproject.toml setup.py $(COMPILED)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("dist2 needs Python 3.11 or newer; $(PYTHON) is Python %d.%d. Name another one: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing into $(VENV) (once; about 1.5 GB there with torch's build for CPUs): $(TORCH), then dist2 with its"
	@echo "extra \"dev\" (listed in pyproject.toml), from the package index that pip is configured for."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@if [ -n "$(TORCH_CPU)" ]; then \
	  echo "No GPU seen: trying torch's build for CPUs first."; \
	  $(BIN)/python -m pip install --quiet "$(TORCH_CPU)" 2>/dev/null || { \
	    echo "The index has no $(TORCH_CPU). Installing $(TORCH), which may bring the libraries of CUDA; to avoid that,"; \
	    echo "set PIP_EXTRA_INDEX_URL to an index with builds for CPUs."; }; \
	fi
	@$(BIN)/python -m pip install --quiet "$(TORCH)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo --ranks $(RANKS) --epochs $(EPOCHS) --hold $(HOLD)

# Test files are distributed over WORKERS, more than 2 cores: ranks often wait. Tests marked "alone" run one after
# another at the beginning. Byte code is kept: hundreds of processes import the library.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST)

# On a machine with a GPU, with the torch, cupy, setuptools and cython that PYTHON has: nothing is downloaded or
# installed. The extensions are built in place, and the names of the backends are written below build/. Without a GPU the tests over
# the stub of NCCL run, and those of the GPU are skipped with the reason.
IN_PLACE := env PYTHONPATH="$(CURDIR):$(CURDIR)/build:$$PYTHONPATH" $(PYTHON)

build/dist2.egg-info: pyproject.toml setup.py $(COMPILED)
	@mkdir -p build
	@PYTHONWARNINGS=ignore $(PYTHON) setup.py --quiet egg_info --egg-base build build_ext --inplace
	@touch $@

gpu-test: build/dist2.egg-info
	$(IN_PLACE) -m pytest -q tests/backends/nccl/test_library.py tests/backends/nccl/test_communicator.py tests/backends/nccl/test_streams_of_devices.py
	$(IN_PLACE) -m pytest -q tests/gpu

gpu-bench: build/dist2.egg-info
	$(IN_PLACE) benchmarks/nccl.py

# The core alone, without Python, under sanitizers. CC names the compiler.
CORE := $(wildcard dist2/core/*.c)

core-test:
	@mkdir -p build
	@for sanitizer in address,undefined thread; do \
	  echo "core: -fsanitize=$$sanitizer"; \
	  $(CC) -std=gnu11 -O1 -g -Wall -Wextra -fsanitize=$$sanitizer -Idist2/core -Wl,--wrap=sched_yield $(CORE) \
	    -o build/core-test -lpthread && \
	  build/core-test || exit 1; \
	done

# The conformance suite on a debug build of the extensions, apart from the one in place: Cython checks reference
# counts, and the compiler's sanitizers addresses and undefined behaviour. The sanitizer's library has to be the first
# that a process loads, and finds C++'s exceptions only if that library is loaded then. It maps 20 TiB of addresses by
# itself, which one test counts.
DEBUG := $(CURDIR)/build/debug
DEBUG_PATH := $(DEBUG)/lib $(CURDIR)/tests/debug_build
PRELOADED = $(foreach name,libasan.so libstdc++.so,$(shell $(CC) -print-file-name=$(name)))

debug-test: $(VENV)/.installed
	@mkdir -p $(DEBUG)/lib
	@find $(DEBUG)/lib -name '*.py' -delete
	@$(BIN)/python setup.py --quiet build --debug --build-base $(DEBUG) --build-lib $(DEBUG)/lib
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH="$(subst $() ,:,$(DEBUG_PATH))" \
	$(PYTEST) --override-ini pythonpath="$(DEBUG_PATH) . tests benchmarks examples/custom_backend" \
	  --deselect tests/conformance/test_thread_ranks.py::test_many_ranks_need_little_address_space \
	  tests/debug_build/checks.py tests/conformance

# As test, with the exhaustive sweeps, and the debug build.
test-all: $(VENV)/.installed
	$(PYTEST) -m ""
	$(MAKE) debug-test

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
