"""Fixtures of the contract tests: pools that are checked when a test ends, and one way to say "refused"."""

import argparse
import contextlib
import datetime
import fcntl
import os
import re
import sys
import zlib
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

# One thread of BLAS per process of pytest-xdist, which hands it on. NumPy reads it when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from kvpool import Plan, Pool, _core
from kvpool.errors import PoolClosed

# What somebody has built on this machine changes nothing here; test_mlx_native.py builds its own.
os.environ.setdefault("KVPOOL_MLX_NATIVE", "0")

ALL_FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "csr", "slot_ids")

# Calls on one sequence, by name: each of them must refuse a dead handle.
ONE_HANDLE_CALLS = {
    "table": lambda pool, plan, h: pool.table(h),
    "num_tokens": lambda pool, plan, h: pool.num_tokens(h),
    "capacity": lambda pool, plan, h: pool.capacity(h),
    "kv_len": lambda pool, plan, h: pool.kv_len(h),
    "compact": lambda pool, plan, h: pool.compact(h, 0),
    "unshare": lambda pool, plan, h: pool.unshare(plan, [h], 0),
    "evict_blocks": lambda pool, plan, h: pool.evict_blocks(h, []),
    "fork": lambda pool, plan, h: pool.fork(h),
    "close": lambda pool, plan, h: pool.close(h),
    "truncate": lambda pool, plan, h: pool.truncate(h, 0),
    "can": lambda pool, plan, h: pool.can([h], 1),
    "step": lambda pool, plan, h: pool.step(plan, [h], 1),
    "reserve": lambda pool, plan, h: pool.reserve(plan, [h], 1),
}


def _share(text):
    """Read ``1/3``."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if 0 <= (share := Fraction(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1, such as 1/3")


def pytest_addoption(parser):
    parser.addoption("--share", type=_share, default="1", help="which share of the long tests runs, such as 1/3")
    parser.addoption("--share-seed", default=f"{datetime.date.today()}", help="what draws it, the date by default")


def pytest_report_header(config):
    """What repeats the draw."""
    share, seed = config.option.share, config.option.share_seed
    return [f"{share} of the long tests, as make test-all SHARE={share} SEED={seed} draws them"] if share < 1 else []


#: pytest-xdist gives a whole file to one process. The slowest files begin first, so that none runs alone at the end.
#: The marker `long` is something else, see below.
BEGIN_FIRST = (
    *("packaging", "metal_attention", "backend_conformance", "backend_mlx", "metal_backend"),
    *("metal_mutations", "scheduler_canary", "engine_store", "ranks"),
    *("backend_cpu", "mlx_lm_turns", "mlx_lm_adapter", "mlx_native", "metal_bytes"),
    *("mlx_fused", "cli_generate", "cli_bench", "scheduler_groups", "scheduler_ahead"),
)


#: What `make test` leaves to `make test-all`: folders and files, by the names of `tests/`. Their tests get the marker
#: `long`. Metal kernels run in an interpreter, and most others start servers or processes. The files in `KEPT_IN` stay:
#: they launch each Metal kernel. `SLOW` are single tests and planted faults that cost as much as a file.
#:
#: `ONE_OF_MANY`: a test that is repeated over models, options or seeds runs once in `make test`, for another one from
#: test to test. All of them are in `make test-all`. Tests that plant a fault are not thinned out.
KEPT_IN = ("metal_mutations", "metal_scores")
LEFT_TO_TEST_ALL = (
    *("metal", "benchmarks"),
    *("packaging", "ranks"),
    *("backend_mlx", "mlx_native", "mlx_native_metal", "capi_examples"),
    *("stubs", "cross"),
    *("cli_cache", "cli_serve", "capi_speed", "mlx_lm_turns"),
    *("serving_hostile", "serving_kills", "serving_tools", "serving_limits", "serving_failures", "serving_faults"),
    *("serving_store", "serving_tenants", "serving_neighbours"),
    *("engine_store", "engine_eviction", "mlx_lm_eviction"),
    *("mlx_lm_raises", "mlx_lm_windows", "mlx_lm_arenas"),
    *("store_server", "cli_generate_process", "backend_cpu_interrupts"),
)
ONE_OF_MANY = (
    *("mlx_lm", "scheduler_groups", "scheduler_workloads", "scheduler_preemption"),
    *("serving_api", "backend_cpu", "threads", "backend_raises", "backend_conformance"),
    *("cli_generate", "prompt_cache", "sizing_bytes", "store_conformance"),
    *("scheduler_ahead", "scheduler_cancel", "scheduler_eviction"),
)
SLOW = (
    "test_store_passes_every_case_of_the_kit[disk-True-threads_get_their_own_blocks]",
    "test_store_passes_every_case_of_the_kit[tiered-True-threads_get_their_own_blocks]",
    "test_capabilities_narrow_what_the_kit_tries",
    "test_backend_that_fails_once_is_a_finding_and_its_script_is_said_to_pass",
)


#: What `make test` gives to ``-m``.
MAKE_TEST = "not long and not slow"
#: Names of tests that plant a fault and pass when it is found.
PLANTED = re.compile(
    r"planted_(fault|bug|copy)|_canary_|_fault_(in|is)_|each_fault_of|broken_\w*is_convicted|corrupting_pool"
)


def plants(item):
    """Whether a test brings a fault of its own: then it says little of another one."""
    return PLANTED.search(item.originalname) is not None


def _name(path):
    return path.stem.removeprefix("test_")


def _is_left_to_test_all(path):
    return bool({path.parent.name, _name(path)} & set(LEFT_TO_TEST_ALL)) and _name(path) not in KEPT_IN


def pytest_ignore_collect(collection_path, config):
    """`make test` does not import the files that it leaves out."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr == MAKE_TEST and is_test and _is_left_to_test_all(collection_path):
        return True
    return None


def _is_drawn(item):
    """Whether a long test is in today's share, by its name alone: other tests come and go, its draw stays."""
    share, seed = item.config.option.share, item.config.option.share_seed
    return zlib.crc32(f"{seed} {item.nodeid}".encode()) < share * 2**32


def pytest_collection_modifyitems(config, items):
    """The slowest files first, the marker `long` for what `make test` leaves out, and the share of these that runs.

    ``--no-loadscope-reorder`` keeps the order: xdist would begin with the files that have many tests.
    """
    place = {f"test_{name}": number for number, name in enumerate(BEGIN_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    repeated = defaultdict(list)
    for item in items:
        if _is_left_to_test_all(item.path) or item.name in SLOW:
            item.add_marker(pytest.mark.long)
        elif {item.path.parent.name, _name(item.path)} & set(ONE_OF_MANY) and not (
            plants(item) or item.get_closest_marker("long") or item.get_closest_marker("slow")
        ):
            repeated[item.path, item.originalname].append(item)
    for (_, name), them in repeated.items():
        kept = zlib.crc32(name.encode()) % len(them)
        for item in them[:kept] + them[kept + 1 :]:
            item.add_marker(pytest.mark.long)
    left = [item for item in items if item.get_closest_marker("long") and not _is_drawn(item)]
    config.hook.pytest_deselected(items=left)
    dropped = set(left)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def core():
    """An object with the classes `Pool` and `Plan`."""
    return SimpleNamespace(Pool=Pool, Plan=Plan, all_formats=ALL_FORMATS)


@pytest.fixture
def make_pool():
    """``make_pool(num_blocks=16, block_size=4, **options)``; invariants are checked when the test ends."""
    pools = []

    def make(num_blocks=16, block_size=4, **options):
        options.setdefault("max_seqs", 64)
        options.setdefault("seed", 1)
        pools.append(Pool(num_blocks, block_size, **options))
        return pools[-1]

    yield make
    for pool in pools:
        with contextlib.suppress(PoolClosed):
            pool.check()
        pool.shutdown()


@pytest.fixture
def make_plan():
    """``make_plan(pool, max_rows=8, max_tokens=64, **options)``."""

    def make(pool, max_rows=8, max_tokens=64, **options):
        return Plan(pool, max_rows, max_tokens, **options)

    return make


@pytest.fixture
def grow(make_plan):
    """``grow(pool, handle, n)`` writes n tokens and waits for them: a step that is done at once."""

    def grow_by(pool, handle, n):
        plan = make_plan(pool, 1, max(n, 1), formats=("seq_lens",))
        pool.step(plan, [handle], n)
        if plan.is_pending:
            pool.done(plan)

    return grow_by


def contents(plan):
    """Everything that a plan and its groups show, as plain Python values."""
    shown = []
    for part, kind in [(plan, _core.Plan), *((group, _core.PlanGroup) for group in plan.groups)]:
        for name in dir(kind):
            with contextlib.suppress(AttributeError, ValueError):  # a format that nobody asked for
                value = getattr(part, name)
                shown += [(name, value)] if isinstance(value, int) else []
                shown += [(name, value.tolist())] if isinstance(value, np.ndarray) else []
    return shown


@contextlib.contextmanager
def _refused(pool, exception, call, value=None, *, plans=()):
    fingerprint, digest = pool.fingerprint(), pool.digest()
    shown = [contents(plan) for plan in plans]
    with pytest.raises(exception) as caught:
        yield caught
    message = str(caught.value)
    assert caught.type in (exception if isinstance(exception, tuple) else (exception,)), caught.getrepr()
    assert message.startswith(f"[{call}] "), message
    if value is not None:
        assert f"{value}" in message, f"the value {value} is not in: {message}"
    assert pool.fingerprint() == fingerprint, "the refused call changed the pool"
    assert pool.digest() == digest, "the refused call changed the digest"
    assert [contents(plan) for plan in plans] == shown, "the refused call changed a plan"


@pytest.fixture
def refused():
    """``with refused(pool, StaleHandle, "close", handle, plans=[plan]): ...``

    The body must raise exactly this class, with a message ``[call] ... value ...``, and leave the fingerprint
    and digest of the pool and everything that the plans show as they were.
    """
    return _refused


def _metal_engines():
    """Names of what can run Metal kernels here; MLX is loaded on a Mac only. ``KVPOOL_METAL_ENGINE`` names another."""
    if chosen := os.environ.get("KVPOOL_METAL_ENGINE"):
        return [chosen]
    if sys.platform == "darwin":
        with contextlib.suppress(ImportError):
            import mlx.core as mx

            return ["stand-in", "native"] if mx.metal.is_available() else ["stand-in"]
    return ["stand-in"]


@pytest.fixture(scope="session", params=_metal_engines())
def engine(request):
    """What runs the Metal kernels: the tests' own Metal on the CPU, and Metal itself where it exists."""
    from metal_engine import ENGINES

    return ENGINES[request.param]()


@pytest.fixture(scope="session")
def counting_engine():
    """The engine that counts what kernels move."""
    from metal_engine import StandIn

    return StandIn()


@pytest.fixture(scope="session")
def built():
    """A folder with the extension for MLX, compiled if sources, MLX or Python have changed since the last run."""
    from kvpool_backends.mlx import native
    from kvpool_backends.mlx.native.__main__ import build

    folder = Path(__file__).parents[1] / "build" / "mlx-native"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        try:
            native.open_module(folder)
        except native.Unfit:
            build(folder)
    return folder


@pytest.fixture
def files_open(tmp_path):
    """Return the open files below `tmp_path`. What other tests left to the garbage collector does not count."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("there is no /proc/self/fd here")
    return lambda: [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if tmp_path.name in path]
