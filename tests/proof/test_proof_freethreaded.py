"""What `proof.freethreaded` runs without a GIL, run here as it is; and how it gets its interpreter."""

import subprocess
import sys
import tarfile

import pytest
from proof.callers import Caller, Rude, Wrong

import kvpool
import proof.__main__ as table
from kvpool.errors import ConcurrentUse
from kvpool.testing import RecordedPool
from proof import SHORT, freethreaded, freethreaded_run
from tests.verify.builds import interpreter

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


def test_refusal_because_of_other_threads_is_a_finding_of_rude_callers_too(monkeypatch):
    pools_of(Refusing, monkeypatch)
    with pytest.raises(ConcurrentUse):
        freethreaded_run.rude(4_000, 1)


def test_rude_callers_take_the_sequences_of_others():
    pool, everybody = freethreaded_run.new_pool(0), []
    callers = [Rude(pool, number, 1, everybody) for number in range(3)]
    for _ in range(20):
        for caller in callers:
            caller.run(20)
    own = set(callers[0].lengths)
    assert any(set(callers[0].some()) - own for _ in range(50))


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


def test_gate_with_an_interpreter_is_in_the_table(empty, monkeypatch):
    for kind in interpreter.KINDS:
        (empty / kind).mkdir()
        (empty / kind / "made").touch()
    monkeypatch.setattr(freethreaded, "refused", lambda: None)
    assert table.reasons() == {}
    monkeypatch.setattr(freethreaded, "refused", lambda: "setarch is refused")
    assert table.reasons() == {"freethreaded": "setarch is refused"}


def test_table_names_the_gates_that_were_not_run(monkeypatch, capsys):
    monkeypatch.setattr(table, "reasons", lambda: dict.fromkeys(table.GATES, "no interpreter"))
    assert table.main([]) == 0
    assert "not run: freethreaded: no interpreter" in capsys.readouterr().out


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


def test_source_is_taken_from_the_first_suite_that_has_it(empty, monkeypatch):
    asked = []

    def apt(suite, *arguments, cwd):
        asked.append((suite, arguments[0]))
        if suite == "sid" and arguments[0] == "source":
            return False
        if arguments[0] == "source":
            (empty / "Python-3").mkdir()
            (empty / "Python-3" / "configure").touch()
            with tarfile.open(cwd / f"{arguments[-1]}_3.orig.tar.xz", "w:xz") as tar:
                tar.add(empty / "Python-3", "Python-3")
        return True

    monkeypatch.setattr(interpreter, "apt", apt)
    assert interpreter.source() == interpreter.source() == empty / "source" / "Python-3"
    assert asked == [("sid", "update"), ("sid", "source"), ("trixie", "update"), ("trixie", "source")]


def test_missing_python_source_raises(empty, monkeypatch):
    monkeypatch.setattr(interpreter, "apt", lambda *given, cwd: False)
    with pytest.raises(RuntimeError, match=r"no source of python3\.14 or python3\.13"):
        interpreter.source()


def test_apt_is_given_a_list_of_its_own(empty, monkeypatch):
    given = []
    monkeypatch.setattr(interpreter, "mirror", lambda: "http://mirror.example/debian/")
    ended = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(interpreter.subprocess, "run", lambda command, **more: given.append(command) or ended)
    assert interpreter.apt("sid", "update", cwd=empty)
    listed = empty / "apt" / "sid" / "suite.sources"
    assert "Types: deb-src\nURIs: http://mirror.example/debian/\nSuites: sid\n" in listed.read_text()
    (command,) = given
    assert f"Dir::Etc::sourcelist={listed}" in command and "Dir::Etc::sourceparts=/dev/null" in command
    assert all(str(empty) in part for part in command if part.startswith(("Dir::State", "Dir::Cache")))


def test_machine_without_apt_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(interpreter.shutil, "which", lambda name: None)
    assert interpreter.main() == 2
    assert "Debian" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the interpreter is built on Debian")
def test_machine_without_headers_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(interpreter.shutil, "which", lambda name: name)
    monkeypatch.setattr(interpreter, "HEADERS", {"no/such.h": "libno-dev"})
    assert interpreter.main() == 2
    assert "apt-get install libno-dev" in capsys.readouterr().err


# ---------------------------------------------------------------------- this very interpreter


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="a CPython without a GIL")
def test_import_of_all_modules_leaves_the_gil_off():
    code = "import sys, kvpool, kvpool.capi, kvpool_backends.cpu; sys.exit(sys._is_gil_enabled())"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0
