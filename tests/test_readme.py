"""What README.md shows is what happens: its example runs, prints what it says, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
EXAMPLE_LINES_MAX = 20


def test_example_prints_what_is_shown():
    result = subprocess.run([sys.executable, "-W", "error", "-c", EXAMPLE[1]], capture_output=True, text=True)
    assert (result.stdout, result.stderr, result.returncode) == (EXAMPLE[2], "", 0)


def test_example_is_at_most_20_lines():
    assert len([line for line in EXAMPLE[1].splitlines() if line]) <= EXAMPLE_LINES_MAX


def test_named_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", texts, re.MULTILINE))
    assert {"demo", "test", "bench"} <= named <= targets


def test_linked_files_exist():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)
