"""What mypy and pyright say of user_program.py, beside the mistakes that its comments name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("user_program.py")
MARK = {"mypy": r"# type: ignore\[([\w-]+)\]", "pyright": r"# pyright: ignore\[(\w+)\]"}


def planted(checker):
    """(line, rule) of each mistake that the program's comments name."""
    lines = enumerate(PROGRAM.read_text().splitlines(), 1)
    return {(number, rule) for number, line in lines for rule in re.findall(MARK[checker], line)}


def reported(checker, folder, python):
    """(line, rule) of each mistake that a checker finds in the program without its comments, in `folder`."""
    program = folder / PROGRAM.name
    program.write_text(re.sub(r"  # type: ignore.*", "", PROGRAM.read_text()))
    options = {
        "mypy": ["--python-executable", python, "--config-file=", "--cache-dir", "cache", "--no-error-summary"],
        "pyright": ["--pythonpath", python, "--outputjson"],
    }[checker]
    result = subprocess.run(
        [sys.executable, "-m", checker, *options, program.name],
        cwd=folder, env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    if checker == "pyright":
        found = json.loads(result.stdout)["generalDiagnostics"]
        return {(one["range"]["start"]["line"] + 1, one["rule"]) for one in found}
    found = re.findall(r"^user_program\.py:(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    return {(int(line), rule) for line, rule in found}
