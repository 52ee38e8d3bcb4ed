"""What `proof.freethreaded` runs without a GIL, run here as it is; and how it gets its interpreter."""

import subprocess
import sys

import pytest

import kvpool
import proof.__main__ as table
from kvpool.errors import ConcurrentUse
from kvpool.testing import RecordedPool
from proof import SHORT, freethreaded, freethreaded_run, interpreter
from proof.callers import Caller, Wrong

SEEDS = (1, 2, 3, 4)  # one for each kind of pool


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", ["shared", "rude", "apart"])
def test_threads_on_pools_do_what_their_books_say(case, seed):
    assert freethreaded_run.CASES[case](4_000, seed)["calls"] >= 4_000


def test_callers_make_every_call_and_most_of_them_succeed():
    pool = RecordedPool(180, 4, max_seqs=40, max_blocks_per_seq=12, seed=1, prefix_cache=True)
    callers = [Caller(pool, number, 1) for number in range(2)]
    for _ in range(40):
        for caller in callers:
            caller.run(50)
    assert len(pool.calls) > 0.3 * sum(caller.calls for caller in callers)
    stats = pool.prefix.stats()
    assert stats.inserted > 10 and stats.hit_tokens > 0


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


class Lenient(kvpool.Pool):
    """Closes what is closed."""

    def close(self, handles):
        if isinstance(handles, int) and not self.is_open(handles):
            return
        super().close(handles)


def pools_of(kind, monkeypatch):
    """All cases make their pools of this kind."""
    kinds = freethreaded_run.KINDS

    def new_pool(turn):
        return kind(180, 4, max_seqs=40, max_blocks_per_seq=12, seed=turn, **kinds[turn % len(kinds)])

    monkeypatch.setattr(freethreaded_run, "new_pool", new_pool)


@pytest.mark.parametrize("kind", [Forgetful, Refusing, Lenient])
def test_pool_that_does_something_else_is_detected(kind, monkeypatch):
    pools_of(kind, monkeypatch)
    with pytest.raises((Wrong, kvpool.KVPoolError)):
        freethreaded_run.shared(4_000, 1)


# ---------------------------------------------------------------------- the gate, the interpreter


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """No interpreter was built."""
    monkeypatch.setattr(interpreter, "FOLDER", tmp_path)
    return tmp_path


def test_gate_without_an_interpreter_says_so_and_is_left_out_of_the_table(empty):
    for made in (freethreaded.measure(SHORT), freethreaded.planted(SHORT)):
        assert [figure.holds for figure in made] == [False]
        assert "make freethreaded" in made[0].notes
    assert list(table.reasons()) == ["freethreaded"]


def test_finding_is_the_last_line_of_the_child(monkeypatch):
    def ended(code, out, err):
        return lambda *given, **more: subprocess.CompletedProcess([], code, out, err)

    for child, expected in (
        (ended(0, '{"calls": 7}', ""), ({"calls": 7, "reports": 0}, "")),
        (ended(1, "", "Traceback\nWrong: two tags"), ({"calls": 0, "reports": 0}, "shared: Wrong: two tags")),
        (ended(-11, "", ""), ({"calls": 0, "reports": 0}, "shared: signal 11")),
        (ended(66, "", f"{freethreaded.WARNING}: data race kvpool/_core.c"), ({"calls": 0, "reports": 1}, "_core.c")),
    ):
        monkeypatch.setattr(freethreaded, "run", child)
        facts, finding = freethreaded.child("free", "shared", 1, 1)
        assert facts == expected[0] and expected[1] in finding


def test_case_that_does_not_end_is_a_finding(monkeypatch):
    def run(*given, timeout):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(freethreaded, "run", run)
    assert freethreaded.child("free", "shared", 1, 1)[1] == "shared: no end in 900 s"


def test_report_that_names_nothing_of_ours_is_the_interpreters(monkeypatch):
    text = f"{freethreaded.WARNING}: data race\n  #0 numpy/_core\n"
    monkeypatch.setattr(
        freethreaded, "run", lambda *given, **more: subprocess.CompletedProcess([], 66, '{"calls": 1}', text)
    )
    assert freethreaded.child("free-tsan", "shared", 1, 1) == ({"calls": 1, "reports": 0}, "")


# ---------------------------------------------------------------------- this very interpreter


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="a CPython without a GIL")
def test_import_of_all_modules_leaves_the_gil_off():
    code = "import sys, kvpool, kvpool.capi, kvpool_backends.cpu; sys.exit(sys._is_gil_enabled())"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0
