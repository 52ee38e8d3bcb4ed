"""Copies of the tree, compiled otherwise and only when something changed."""

import pytest

from tests.verify import builds

# Compiles nothing: writes down how it was called.
FAKE_SETUP = """
import os, pathlib
switches = sorted(name for name in os.environ if name.startswith("KVPOOL_"))
pathlib.Path("calls.o").open("a").write(" ".join(switches) + "\\n")
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of two files in place of this one."""
    (tmp_path / "kvpool").mkdir()
    (tmp_path / "kvpool" / "__init__.py").write_text("name = 'kvpool'\n")
    (tmp_path / "kvpool" / "_core.pyx").write_text("number = 1\n")
    (tmp_path / "kvpool_backends" / "cpu").mkdir(parents=True)
    (tmp_path / "kvpool_backends" / "cpu" / "_kernels.pyx").write_text("")
    (tmp_path / "setup.py").write_text(FAKE_SETUP)
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    return tmp_path


def calls(folder):
    return (folder / "calls.o").read_text().splitlines()


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_build_follows_the_sources(tree, change):
    folder = builds.build("debug")
    core = tree / "kvpool" / "_core.pyx"
    if change == "edit":
        core.write_text("number = 2\n")
    elif change == "add":
        (tree / "kvpool" / "more.pyx").write_text("")
    else:
        core.unlink()
    builds.build("debug")
    assert len(calls(folder)) == 2
    assert {path.name for path in (folder / "kvpool").iterdir()} == {path.name for path in core.parent.iterdir()}


def test_run_imports_the_copy_and_never_the_build_in_place(tree):
    code = "import kvpool, os, sys; print(kvpool.__file__); print(os.getcwd()); sys.exit(3)"
    done = builds.run("release", ["-c", code])
    assert done.returncode == 3
    folder = tree / "build" / "release"
    assert done.stdout.splitlines() == [str(folder / "kvpool" / "__init__.py"), str(folder)]
