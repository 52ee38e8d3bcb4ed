"""What kvpool costs before it does anything: time of import, bytes of the wheel."""

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STATEMENTS = {"nothing": "pass", "numpy": "import numpy", "kvpool": "import kvpool"}


@pytest.mark.benchmark(group="import", timer=time.perf_counter)
@pytest.mark.parametrize("what", list(STATEMENTS))
def bench_import(measure, what):
    """A new interpreter that imports and ends; the row "nothing" is the interpreter alone."""

    def run():
        subprocess.run([sys.executable, "-c", STATEMENTS[what]], check=True, cwd=ROOT)

    measure(run, 1, row=f"python -c 'import {what}'", who="kvpool", rounds=9)


@pytest.mark.benchmark(group="wheel", timer=time.perf_counter)
def bench_wheel(measure, benchmark, tmp_path):
    """Time of a build; what matters is the size of its result."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]

    def run():
        subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True)

    measure(run, 1, row="pip wheel", who="kvpool", setup=lambda: None, rounds=1)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.compress_size)
    benchmark.extra_info.update(nbytes=wheel.stat().st_size, largest=largest.filename)
