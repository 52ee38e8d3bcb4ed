"""What README.md shows is what happens: its example runs, prints what it says, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
EXAMPLE_LINES_MAX = 30


def test_example_prints_what_is_shown():
    result = subprocess.run([sys.executable, "-W", "error", "-c", EXAMPLE[1]], capture_output=True, text=True)
    assert (result.stdout, result.stderr, result.returncode) == (EXAMPLE[2], "", 0)
    assert len([line for line in EXAMPLE[1].splitlines() if line]) <= EXAMPLE_LINES_MAX


def test_mlx_lm_example_generates_what_mlx_lm_generates(monkeypatch, capsys):
    """With a small model of random weights in place of the one that it downloads."""
    mlx_lm = pytest.importorskip("mlx_lm")
    from kvpool.adapters.mlx_lm import loading

    model, tokenizer = loading.load("tiny")
    monkeypatch.setattr(mlx_lm, "load", lambda name: (model, tokenizer))
    (code,) = re.findall(r"```python\n(from mlx_lm .*?)```", README, re.DOTALL)
    ran = {}
    exec(code, ran)
    text = mlx_lm.generate(model, tokenizer, "Once upon a time", max_tokens=100)
    assert capsys.readouterr().out == text + "\n" and model is ran["model"]


def test_named_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", texts, re.MULTILINE))
    assert {"test", "bench", "docs"} <= named <= targets


def test_named_commands_exist():
    named = set(re.findall(r"kvpool ([a-z]+)`?$", README, re.MULTILINE)) | set(re.findall(r"`kvpool ([a-z]+)", README))
    assert {"demo", "generate", "serve"} <= named <= COMMANDS.keys()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_linked_files_exist(page):
    """Headings inside of a page are `make docs`' concern."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
