"""Threads that call one pool, or one each, at once: each call gives what it has to, and nothing races.

Here as they are, with a GIL; in the slow tests under ThreadSanitizer (`make tsan`; Linux, gcc, ``setarch -R``), and in
a CPython without a GIL (`make freethreaded` builds it). There the planted fault is a lock that locks nothing.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

import kvpool
from kvpool.errors import ConcurrentUse
from tests.verify import builds
from tests.verify.builds import interpreter
from tests.verify.slow import threads
from tests.verify.slow.callers import Wrong

HAMMERED = 5_000_000  # operations under ThreadSanitizer
LEAST = 40_000  # fewer are over before the second thread has begun
CALLS = {"free": 3_000_000, "free-tsan": 200_000}  # of each case of pools
STORES = {"free": 4_000, "free-tsan": 400}
COST_MAX = 1.05  # CPU seconds with two threads on two pools, over those of one thread
SECONDS_MAX = 900  # for one case: a chain of blocks that has become a ring does not end
WARNING = "WARNING: ThreadSanitizer"
REPORTED = 66  # the exit status of a process with reports; those that name nothing of ours are the interpreter's
OURS = ("kvpool/", "kvpool_backends/", "kv_", "threads_driver")
IMPORT = "import sys, kvpool, kvpool.capi, kvpool_backends.cpu; sys.exit(sys._is_gil_enabled())"
FOLDERS = ("core", "prefix", "capi", "cpu", "verify/slow")


@pytest.mark.parametrize("seed", range(len(threads.KINDS)))
@pytest.mark.parametrize("case", threads.POOLS)
def test_threads_on_pools_do_what_their_books_say(case, seed):
    assert case(4_000, seed)["calls"] >= 4_000


class Forgetful(kvpool.Pool):
    """Loses a child of a fork now and then."""

    def fork(self, handle, n=1):
        children = super().fork(handle, n)
        if handle % 3 == 0:
            self.close(int(children[-1]))
        return children


class Refusing(kvpool.Pool):
    """Lets nobody in while somebody else is."""

    def table(self, handle):
        raise ConcurrentUse("[table] the pool is inside another call")


@pytest.mark.parametrize(("case", "kind"), [(threads.shared, Forgetful), (threads.strangers, Refusing)])
def test_pool_that_does_something_else_is_detected(case, kind, monkeypatch):
    monkeypatch.setattr(threads, "Pool", kind)
    with pytest.raises((Wrong, kvpool.KVPoolError)):
        case(4_000, 1)


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="a CPython without a GIL")
def test_import_of_all_modules_leaves_the_gil_off():
    assert subprocess.run([sys.executable, "-W", "error", "-c", IMPORT]).returncode == 0


# ---------------------------------------------------------------------- other builds


def no_tsan():
    """Why ThreadSanitizer cannot run here, if it cannot."""
    prefix = builds.VARIANTS["tsan"].prefix
    if shutil.which(prefix[0]) is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return f"{' '.join(prefix)} is refused here: ThreadSanitizer needs it"
    return ""


def slow_unless(missing):
    """A mark of slow tests, which are skipped where something is missing."""
    return lambda test: pytest.mark.slow(pytest.mark.skipif(missing != "", reason=missing)(test))


tsan, free = slow_unless(no_tsan()), slow_unless(interpreter.missing() or "")


def finding_of(variant, case, calls):
    """What a case has found in a build, nothing if empty; and its facts."""
    command = ["-m", "tests.verify.slow.threads", case.__name__, str(calls), variant.partition("-")[0]]
    try:
        done = builds.run(variant, command, timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS_MAX} s", {}
    reports = [part for part in done.stderr.split(WARNING)[1:] if any(name in part for name in OURS)]
    if reports:
        return f"{len(reports)} reports, the first: {WARNING}{reports[0][:3000]}", {}
    if done.returncode not in (0, REPORTED) or not done.stdout:
        return f"ended with {done.returncode}: {done.stderr[-3000:]}", {}
    return "", json.loads(done.stdout)


@tsan
@pytest.mark.parametrize(("case", "calls"), [(threads.hammered, HAMMERED), (threads.shared, HAMMERED // 100)])
def test_tsan_has_no_report_of_threads_on_pools(case, calls):
    finding, _ = finding_of("tsan", case, calls)
    assert not finding, finding


@tsan
def test_tsan_reports_threads_that_nothing_keeps_apart():
    assert WARNING in finding_of("tsan", threads.hammered_without_a_lock, LEAST)[0]


@free
@pytest.mark.parametrize("variant", CALLS)
@pytest.mark.parametrize("case", [*threads.POOLS, threads.stores])
def test_free_threads_on_pools_and_stores_have_no_finding(variant, case):
    calls = STORES if case is threads.stores else CALLS
    finding, _ = finding_of(variant, case, calls[variant])
    assert not finding, finding


@free
@pytest.mark.parametrize("variant", ["free-unlocked", "free-tsan-unlocked"])
def test_free_threads_find_a_lock_that_locks_nothing(variant):
    assert finding_of(variant, threads.shared, 60_000)[0]


@free
@pytest.mark.parametrize("folder", FOLDERS)
def test_free_core_and_stores_pass_their_tests(folder):
    done = builds.run("free", ["-m", "pytest", "-q", "-n", "2", "-m", "not long and not slow", f"tests/{folder}"])
    assert done.returncode == 0, done.stdout[-3000:]


@free
def test_free_threads_on_two_pools_cost_what_one_costs():
    finding, facts = finding_of("free", threads.cost, 200_000)
    assert not finding, finding
    assert facts["ratio"] <= COST_MAX, f"{facts} on {os.cpu_count()} cores"
