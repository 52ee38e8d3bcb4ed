# make demo   sets everything up in .venv and runs the main job
# make test   sets everything up in .venv and passes the tests that catch most faults
# `make help` lists the rest. PYTHON=python3.12 names the interpreter, PYTEST_ARGS adds to pytest's arguments.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all verify fuzz test-metal metal-sweep test-embed test-torch test-engines \
	test-long native cross mac-report docs lint bench bench-gates build debug asan tsan freethreaded coverage clean
MAKEFLAGS += --no-print-directory
unexport PYTHONDONTWRITEBYTECODE  # left set, each process of the tests would compile pytest, kvpool and the tests anew

VENV := .venv
PY := $(VENV)/bin/python
DOCS := build/docs-env
PIP := $(PY) -m pip install --disable-pip-version-check
PYTEST := $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
THREADS := tests/verify/slow/test_threads_at_once.py
SOURCES := $(wildcard kvpool/*.pyx kvpool/*.pxd kvpool/core/*.p* kvpool/include/*.h) \
	$(wildcard $(addprefix kvpool_backends/cpu/,*.pyx *.pxd *.pxi kernels/*.c kernels/*.h)) \
	$(wildcard tests/verify/*.p* tests/verify/slow/*.pyx)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/built $(VENV)/demo  ## set everything up, run the main job (a few minutes the first time)
	$(PY) -m kvpool demo

test: lint  ## set everything up, check style and types, run the tests that catch most faults (eight minutes)
	@echo "==> running the tests that catch most faults; make test-all runs all but the slow ones, make verify these"
	$(PYTEST) -m "not long and not slow" $(PYTEST_ARGS)

# SHARE draws tests by the day, or by SEED. With it, nothing is compiled for other machines.
test-all: lint $(if $(SHARE),,cross)  ## all but the slow tests (an hour); SHARE=1/4 draws a quarter of the long ones
	@echo "==> running the tests of make test and $(or $(SHARE),all) of the long ones"
	$(PYTEST) $(if $(SHARE),--share $(SHARE) $(if $(SEED),--share-seed $(SEED))) $(PYTEST_ARGS)

verify: MINUTES := 20
verify: $(VENV)/built $(VENV)/test  ## MINUTES of random programs (20), half of them sanitized; asan; the slow tests; mutants
	$(PY) -m tests.verify --seconds $$(($(MINUTES) * 30))
	$(PY) -m tests.verify.builds asan -m tests.verify --seconds $$(($(MINUTES) * 30))
	$(MAKE) asan
	$(PYTEST) -m slow $(PYTEST_ARGS)
	$(PY) -m tests.verify.mutants --jobs 2 --mutants $$(($(MINUTES) * 5))

fuzz: $(VENV)/built $(VENV)/test  ## random programs on the compiled core for a minute (FUZZ_ARGS="--ops 1e9")
	$(PY) -m tests.verify $(or $(FUZZ_ARGS),--seconds 60)

test-metal: $(VENV)/built $(VENV)/test  ## the tests of the Metal kernels, with 2,000 launches more
	KVPOOL_METAL_LAUNCHES=2000 $(PYTEST) --timeout 3600 tests/metal $(PYTEST_ARGS)

metal-sweep: $(VENV)/built $(VENV)/test  ## the Metal kernels over all shapes and features, hours: KVPOOL_METAL_SWEEP=0.01 runs one in a hundred
	KVPOOL_METAL_SWEEP=$${KVPOOL_METAL_SWEEP:-1} KVPOOL_METAL_LAUNCHES=2000 $(PYTEST) --dist load --timeout 36000 \
		tests/metal/test_metal_attention.py tests/metal/test_metal_packed_attention.py -k every_pair $(PYTEST_ARGS)

test-embed: $(VENV)/built $(VENV)/test  ## the tests of the JAX adapter (installs jax)
	$(PIP) "kvpool[jax]"
	$(PYTEST) tests/with_jax $(PYTEST_ARGS)

test-torch: $(VENV)/built $(VENV)/test  ## the tests of the transformers adapter (installs torch and transformers)
	$(PIP) "kvpool[transformers]"
	$(PYTEST) tests/with_torch $(PYTEST_ARGS)

test-engines: $(VENV)/built $(VENV)/test  ## the adapters on the oldest and newest releases of each framework (ENGINES=mlx-oldest: one)
	$(PY) -m tests.engines $(ENGINES)

test-long: $(VENV)/built $(VENV)/test  ## the tests with ten times the random examples, and with pools of a gigabyte
	KVPOOL_FUZZ_EXAMPLES=10000 KVPOOL_LONG=1 $(PYTEST) --timeout 3600 $(PYTEST_ARGS)

cross: $(VENV)/built $(VENV)/test  ## compile for macOS, for CUDA and for Linux on AArch64, whose tests of the core run in qemu
	$(PIP) -q ziglang nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12
	$(PY) -m tests.verify.builds.cross

mac-report: $(VENV)/built $(VENV)/demo  ## on a Mac: what it is, what runs there and how fast, as one block to paste
	@$(PY) -m benchmarks.mac_report

docs: $(VENV)/built $(DOCS)/made  ## the docs site in build/docs, API pages included; a warning or a broken link fails
	PYTHONPATH=. $(DOCS)/bin/python -m sphinx -q -W --keep-going -b html -d build/docs-read docs build/docs
	@echo "==> build/docs/index.html"

lint: $(VENV)/built $(VENV)/test  ## ruff, mypy and pyright
	@echo "==> checking style and types"
	$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy & mypy=$$!; PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(PY); pyright=$$?; \
		wait $$mypy && exit $$pyright

bench: $(VENV)/built $(VENV)/test  ## measure, beside a C floor and a pure-Python allocator
	$(PY) -m benchmarks

bench-gates: $(VENV)/built $(VENV)/test  ## the same, failing when a target is missed
	$(PY) -m benchmarks --gates

build: $(VENV)/built  ## compile the core in place

native: $(VENV)/built $(VENV)/demo  ## compile the extension that writes in MLX's memory, for the MLX in .venv
	$(PY) -m kvpool_backends.mlx.native build

debug: $(VENV)/made  ## compile the core in place with every check on; make build goes back
	@rm -f $(VENV)/built
	KVPOOL_DEBUG=1 $(PY) setup.py -q build_ext --inplace

asan: $(VENV)/built $(VENV)/test  ## the core's and the CPU backend's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(PY) -m tests.verify.builds asan-cpu -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS) \
		$(addprefix --ignore=tests/,repository verify mlx_lm metal sizing capi/test_capi_speed.py) \
		--ignore=tests/benchmarks/test_baselines.py \
		--ignore-glob '*test_cli_demo*' --ignore-glob '*mlx*'

tsan: $(VENV)/built $(VENV)/test  ## threads on pools, under ThreadSanitizer (Linux, gcc, setarch -R)
	$(PY) -m pytest -m slow -k test_tsan $(THREADS) $(PYTEST_ARGS)

freethreaded: $(VENV)/built $(VENV)/test  ## build a CPython without a GIL, run the core in it (Debian; 20 minutes once)
	$(PY) -m tests.verify.builds.interpreter
	$(PY) -m pytest -m slow -k test_free $(THREADS) $(PYTEST_ARGS)

coverage: $(VENV)/built $(VENV)/test  ## lines and branches of the core that the fuzzer and its tests reach (gcov)
	$(PY) -m pytest -s -m slow -k reach_nearly tests/verify/slow/test_coverage.py $(PYTEST_ARGS)

clean:  ## remove everything that make has made
	rm -rf $(VENV) build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f kvpool/*.so kvpool_backends/cpu/*.so tests/verify/*.so tests/verify/slow/*.so

# Stamp files say what .venv holds already. Build isolation is off: it would download the build tools again.
$(VENV)/made:
	@echo "==> looking for Python, its headers and compilers"
	@python=$$(.ci/check_machine.sh) && echo "==> making $(VENV) with $$python" && \
		rm -rf $(VENV) && "$$python" -m venv $(VENV)
	@echo "==> installing the build tools"
	$(PIP) -q --upgrade cython setuptools
	@touch $@

# The first time pip compiles and installs; later only what changed in the core is compiled.
$(VENV)/built: $(VENV)/made pyproject.toml setup.py $(SOURCES)
	@if [ $(VENV)/installed -nt pyproject.toml ]; then \
		echo "==> compiling what changed in the core" && \
		$(PY) setup.py -q build_ext --inplace; \
	else \
		echo "==> compiling the core and installing kvpool (editable), about a minute" && \
		$(PIP) --no-build-isolation --editable . && touch $(VENV)/installed; \
	fi
	@touch $@

# kvpool is installed: these add what its extras need.
$(VENV)/demo: pyproject.toml $(wildcard kvpool_backends/mlx/native/*.cpp kvpool_backends/mlx/native/*.h) | $(VENV)/built
	@echo "==> installing mlx, mlx-lm, the server, matplotlib and rich"
	$(PIP) "kvpool[demo]"
	@[ "$$(uname)" != Darwin ] || $(PY) -m kvpool_backends.mlx.native build || echo "==> going on without the extension"
	@touch $@

# An environment of its own, with the extra `docs`. kvpool itself is that of the source tree.
$(DOCS)/made: pyproject.toml | $(VENV)/made
	@echo "==> installing Sphinx and what the docs need"
	$(PY) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q numpy $$($(PY) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/test: pyproject.toml | $(VENV)/built $(VENV)/demo
	@echo "==> installing the test tools"
	$(PIP) "kvpool[test,bench,lint]"
	@echo "==> compiling the fuzzer of the core"
	$(PY) setup.py -q build_ext --inplace
	@touch $@
