"""Recorded runs give what they gave, digests and texts, on every build and on every Python that is found here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify import builds
from tests.verify.builds import ROOT
from tests.verify.test_recorded_runs import NUMBERS

pytestmark = pytest.mark.slow

OLDEST = (3, 11)


def assert_same(python, folder, variables):
    command = [str(python), "-m", "tests.verify.test_recorded_runs", "print"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(NUMBERS.read_text())


def other_pythons():
    """Interpreters of the other minor versions that are supported and found."""
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 20)]
    code, found = "import sys; print(sys.implementation.name, *sys.version_info[:2])", {}
    for python in [*filter(None, names), *map(str, sorted(homes.glob("3.*/bin/python")))]:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
        name, *version = done.stdout.split() or [""]
        if name == "cpython" and OLDEST <= tuple(map(int, version)) != sys.version_info[:2]:
            found.setdefault(".".join(version), python)
    return found


@pytest.mark.parametrize("seed", "12")
def test_runs_do_not_depend_on_the_hash_seed(seed):
    assert_same(sys.executable, ROOT, os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed})


@pytest.mark.parametrize("variant", ["debug", "asan"])
def test_runs_do_not_depend_on_the_build(variant):
    assert_same(sys.executable, builds.build(variant), builds.environment(variant))


def test_runs_do_not_depend_on_the_python():
    """Each in an environment below ``build/``, for which the core is compiled in the copy that is as users have it."""
    folder, quiet = builds.build("release", compiles=False), {"capture_output": True, "text": True, "check": True}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVPOOL_")}
    for version, python in other_pythons().items():
        home = ROOT / "build" / "pythons" / version
        inside = home / "bin" / "python"
        if not (home / "ready").exists():
            packages = ["numpy", "cython", "setuptools>=77", "pytest"]
            subprocess.run([python, "-m", "venv", "--clear", str(home)], **quiet)
            subprocess.run([str(inside), "-m", "pip", "install", "-q", *packages], **quiet)
            (home / "ready").touch()
        subprocess.run([str(inside), "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, env=clean, **quiet)
        print(version, end=" ")
        assert_same(inside, folder, builds.environment("release"))
