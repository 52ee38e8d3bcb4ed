# make demo   sets everything up in .venv and runs the main job
# make test   sets everything up in .venv and passes the tests that catch most faults; make test-all runs all of them
# `make help` lists the rest. PYTHON=python3.12 names the interpreter, PYTEST_ARGS adds to pytest's arguments.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all fuzz test-metal metal-sweep test-embed test-torch test-golden-full test-long native cross \
	mac-report lint bench bench-gates build debug asan tsan freethreaded coverage mutants convicted proof proof-long clean
MAKEFLAGS += --no-print-directory
unexport KVPOOL_CORE  # left set, it would have the plain Python model tested in place of the core
unexport PYTHONDONTWRITEBYTECODE  # left set, each process of the tests would compile pytest, kvpool and the tests anew

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check
PYTEST := $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SOURCES := $(wildcard kvpool/*.pyx kvpool/*.pxd kvpool/core/*.p* kvpool/include/*.h) \
	$(wildcard $(addprefix kvpool_backends/cpu/,*.pyx *.pxd kernels/*.c kernels/*.h)) $(wildcard proof/fuzz/*.p* tests/verify/*.p*)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/built $(VENV)/demo  ## set everything up, run the main job (a few minutes the first time)
	$(VENV)/bin/kvpool demo

test: lint  ## set everything up, check style and types, run the tests that catch most faults (eight minutes)
	@echo "==> running the tests that catch most faults; make test-all runs all"
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

# SHARE draws tests by the day, or by SEED. With it, nothing is compiled for other machines.
test-all: lint $(if $(SHARE),,cross)  ## every test (an hour), and compiled for other machines; SHARE=1/3 draws a third
	@echo "==> running the tests of make test and $(or $(SHARE),all) of the long ones"
	$(PYTEST) $(if $(SHARE),--share $(SHARE) $(if $(SEED),--share-seed $(SEED))) $(PYTEST_ARGS)

fuzz: $(VENV)/built $(VENV)/test  ## random programs on the compiled core for a minute (FUZZ_ARGS="--large --ops 1e9")
	$(PY) -m proof.fuzz $(or $(FUZZ_ARGS),--seconds 60)
	$(if $(FUZZ_ARGS),,$(PY) -m proof.fuzz --groups --seconds 30)

test-metal: $(VENV)/built $(VENV)/test  ## the tests of the Metal kernels, with 2,000 launches more; threads under ThreadSanitizer
	KVPOOL_METAL_LAUNCHES=2000 $(PYTEST) --timeout 3600 tests/metal $(PYTEST_ARGS)
	@[ "$$(uname)" != Linux ] || $(PY) -m proof threads

metal-sweep: $(VENV)/built $(VENV)/test  ## the Metal kernels over all shapes and features, hours: KVPOOL_METAL_SWEEP=0.01 runs one in a hundred
	KVPOOL_METAL_SWEEP=$${KVPOOL_METAL_SWEEP:-1} KVPOOL_METAL_LAUNCHES=2000 $(PYTEST) --dist load --timeout 36000 \
		tests/metal/test_metal_attention.py tests/metal/test_metal_packed_attention.py -k every_pair $(PYTEST_ARGS)

test-embed: $(VENV)/built $(VENV)/test  ## the tests of the JAX adapter (installs jax)
	$(PIP) "kvpool[jax]"
	$(PYTEST) tests/with_jax $(PYTEST_ARGS)

test-torch: $(VENV)/built $(VENV)/test  ## the tests of the transformers adapter (installs torch and transformers)
	$(PIP) "kvpool[transformers]"
	$(PYTEST) tests/with_torch $(PYTEST_ARGS)

test-golden-full: $(VENV)/built $(VENV)/test  ## replay the full traces in the folder KVPOOL_TRACES
	KVPOOL_REPLAY_FULL=1 $(PYTEST) tests/replay/test_replay.py $(PYTEST_ARGS)

test-long: $(VENV)/built $(VENV)/test  ## the tests with ten times the random examples, and with pools of a gigabyte
	KVPOOL_FUZZ_EXAMPLES=10000 KVPOOL_LONG=1 $(PYTEST) --timeout 3600 $(PYTEST_ARGS)

cross: $(VENV)/built $(VENV)/test  ## compile for macOS and for Linux on AArch64, where the tests of the core then run in qemu
	$(PIP) -q ziglang
	$(PY) -m proof.cross

mac-report: $(VENV)/built $(VENV)/demo  ## on a Mac: what it is, what runs there and how fast, as one block to paste
	@$(VENV)/bin/kvpool doctor --report

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
	$(PY) -m proof.builds asan-cpu -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS) \
		$(addprefix --ignore=tests/,repository mlx_lm metal sizing capi/test_capi_speed.py cpu/test_cpu_faults.py) \
		--ignore=tests/benchmarks/test_baselines.py \
		--ignore-glob '*test_demo*' --ignore-glob '*test_proof*' --ignore-glob '*mlx*'

tsan: $(VENV)/built $(VENV)/test  ## threads on pools, under ThreadSanitizer (Linux, gcc, setarch -R)
	$(PY) -m proof threads

freethreaded: $(VENV)/built $(VENV)/test  ## build a CPython without a GIL, run the core in it (Debian; 20 minutes once)
	$(PY) -m proof.interpreter
	$(PY) -m proof freethreaded

coverage: $(VENV)/built $(VENV)/test  ## lines and branches of the core that its tests reach (gcov)
	$(PY) -m proof coverage

mutants: $(VENV)/built $(VENV)/test  ## the core made wrong in thousands of ways: how many are seen, how many convicted
	$(PY) -m proof mutants

convicted: $(VENV)/built $(VENV)/test  ## which share of planted faults and mutants `make test` alone convicts
	$(PY) -m proof.convicted --jobs 2

proof: $(VENV)/built $(VENV)/test  ## the table of figures that stand for trust, half an hour; exit 1 if one does not hold
	$(PY) -m proof

proof-long: $(VENV)/built $(VENV)/test  ## the same, and four hours of random calls, mutants and killed servers
	$(PY) -m proof --long

clean:  ## remove everything that make has made
	rm -rf $(VENV) build dist *.egg-info kvpool-demo.png .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f kvpool/*.so kvpool_backends/cpu/*.so proof/fuzz/*.so tests/verify/*.so

# Stamp files say what .venv holds already. Build isolation is off: it would download the build tools again.
$(VENV)/made:
	@echo "==> looking for Python, its headers and compilers"
	@python=$$(scripts/check_machine.sh) && echo "==> making $(VENV) with $$python" && \
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
	@echo "==> installing mlx, mlx-lm and what the demo draws with"
	$(PIP) "kvpool[demo]"
	@[ "$$(uname)" != Darwin ] || $(PY) -m kvpool_backends.mlx.native build || echo "==> going on without the extension"
	@touch $@

$(VENV)/test: pyproject.toml | $(VENV)/built $(VENV)/demo
	@echo "==> installing the test tools"
	$(PIP) "kvpool[test,bench,lint]"
	@echo "==> compiling the fuzzer of the core"
	$(PY) setup.py -q build_ext --inplace
	@touch $@
