"""What kvpool costs before it does anything: time of import, bytes of the wheel."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STATEMENTS = {"nothing": "pass", "numpy": "import numpy", "kvpool": "import kvpool"}


def children_time():
    """CPU seconds of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.benchmark(group="import", timer=children_time)
@pytest.mark.parametrize("what", list(STATEMENTS))
def bench_import(measure, what):
    """A new interpreter that imports and ends; the row "nothing" is the interpreter alone."""

    def run():
        subprocess.run([sys.executable, "-c", STATEMENTS[what]], check=True, cwd=ROOT)

    measure(run, 1, row=f"import {what}", who="kvpool", rounds=9, **{"import": what})


@pytest.mark.benchmark(group="wheel", timer=children_time)
def bench_wheel(measure, benchmark, tmp_path):
    """Time of a build; what matters is the size of its result."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]

    def run():
        subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True)

    measure(run, 1, row="pip wheel", who="kvpool", setup=lambda: None, rounds=1)
    (wheel,) = tmp_path.glob("*.whl")
    benchmark.extra_info["nbytes"] = wheel.stat().st_size
