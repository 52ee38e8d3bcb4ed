"""How a CPython without a GIL is had: from Debian's sources, without a change to the system's."""

import shutil
import subprocess
import sys
import tarfile

import pytest

from tests.verify.builds import interpreter


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """No interpreter was built."""
    monkeypatch.setattr(interpreter, "FOLDER", tmp_path)
    return tmp_path


def test_interpreter_that_was_not_built_is_named_with_what_builds_it(empty):
    assert "make freethreaded" in interpreter.missing()
    for kind in interpreter.KINDS:
        (empty / kind).mkdir()
        (empty / kind / "made").touch()
    assert interpreter.missing() is None


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
    shutil.rmtree(empty / "source")
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


@pytest.mark.skipif(sys.platform != "linux", reason="the interpreter is built on Debian")
@pytest.mark.parametrize(("apt", "said"), [(None, "Debian"), ("apt-get", "apt-get install libno-dev")])
def test_machine_that_cannot_build_is_told_what_it_lacks(apt, said, monkeypatch, capsys):
    monkeypatch.setattr(interpreter.shutil, "which", lambda name: apt)
    monkeypatch.setattr(interpreter, "HEADERS", {"no/such.h": "libno-dev"})
    assert interpreter.main() == 2
    assert said in capsys.readouterr().err
