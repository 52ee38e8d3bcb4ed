"""Instructions that marked stretches of a Python program take, counted by valgrind's callgrind.

The program asks `marks` for three functions: ``count_prepare()`` once, ``count_toggle()`` before and after a stretch,
``count_dump(mark)`` after it. Counts do not depend on caches, clocks or neighbours.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.baselines import load_c

ROOT = Path(__file__).resolve().parent.parent


def marks() -> ctypes.CDLL:
    """The functions that a counted program calls."""
    return load_c("counting")


def is_here() -> bool:
    """Whether there is a valgrind."""
    return shutil.which("valgrind") is not None


def counted(*arguments: str, cwd: Path = ROOT, **environment: str) -> dict[str, list[int]]:
    """Run ``python *arguments`` in `cwd`, a checkout; return instructions by mark, one number for each dump.

    Raises
    ------
    RuntimeError
        The program failed; the message ends with what it said.
    """
    marks()  # compiled here, not under callgrind
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        done = subprocess.run(
            [*command, f"--callgrind-out-file={folder}/counts", sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"[callgrind] {' '.join(arguments[:2])}: {done.stderr[-500:]}")
        found: dict[str, list[int]] = {}
        for path in Path(folder).iterdir():
            text = path.read_text()
            trigger = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if trigger and total:
                found.setdefault(trigger[1], []).append(int(total[1]))
    return found
