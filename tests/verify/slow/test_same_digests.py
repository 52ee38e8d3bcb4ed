"""Same seed, same digests: on every build, and on every Python that is found here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify import builds
from tests.verify.builds import ROOT

pytestmark = pytest.mark.slow

RUNS = 300  # of 3,000 words each
BUILDS = ("debug", "asan")  # beside release
OLDEST = (3, 11)
TRACE = """
import sys
from tests.verify._verify import Run
from tests.verify.run import WORDS_PER_RUN
from tests.verify.words import shape_of

first, runs = map(int, sys.argv[1:])
for seed in range(first, first + runs):
    run = Run(shape_of(seed))
    run.run(WORDS_PER_RUN)
    print(run.digest(), *run.facts())
    run.shutdown()
"""


def trace(python, folder, variables, first=1, runs=RUNS):
    """The digests of all runs, and what each of them met."""
    command = [str(python), "-c", TRACE, str(first), str(runs)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def usual():
    """Those of the build in place."""
    return trace(sys.executable, ROOT, os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"})


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


def test_digests_do_not_depend_on_the_hash_seed(usual):
    assert trace(sys.executable, ROOT, os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "2"}) == usual


@pytest.mark.parametrize("variant", BUILDS)
def test_digests_do_not_depend_on_the_build(variant, usual):
    assert trace(sys.executable, builds.build(variant), builds.environment(variant)) == usual


def test_digests_do_not_depend_on_the_python(usual):
    """Each in an environment below ``build/``, for which the core is compiled in the copy that is as users have it."""
    folder, quiet = builds.build("release", compiles=False), {"capture_output": True, "text": True, "check": True}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVPOOL_")}
    for version, python in other_pythons().items():
        home = ROOT / "build" / "pythons" / version
        inside = home / "bin" / "python"
        if not (home / "ready").exists():
            subprocess.run([python, "-m", "venv", "--clear", str(home)], **quiet)
            subprocess.run([str(inside), "-m", "pip", "install", "-q", "numpy", "cython", "setuptools>=77"], **quiet)
            (home / "ready").touch()
        subprocess.run([str(inside), "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, env=clean, **quiet)
        assert trace(inside, folder, builds.environment("release")) == usual, version


def test_another_seed_gives_other_digests(usual):
    other = trace(sys.executable, ROOT, os.environ | {"PYTHONPATH": str(ROOT)}, first=2, runs=3)
    assert other == usual[1:4] and len(set(usual)) == RUNS
