"""docs/embedding.md does what it says: its examples run. Those of JAX and transformers run in folders of their own."""

import re
from pathlib import Path

import pytest
from embedding_page import PAGE, examples

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("code", [*examples(), *examples("mlx")], ids=lambda code: code.split()[1])
def test_example_runs(code):
    exec(code, {"__name__": "example"})


def test_adapters_can_be_read_in_one_sitting():
    """Those of other frameworks: `block_manager` and `prompt_cache` are interfaces of our own."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "kvpool" / "adapters").glob("*.py")}
    del lines["block_manager.py"], lines["prompt_cache.py"]
    assert len(lines) >= 6 and max(lines.values()) <= 400, lines


def test_wire_formats_of_the_table_exist():
    from kvpool import Plan, Pool

    section = PAGE.split("## Wire formats")[1].split("\n## ")[0]
    named = set(re.findall(r'`"(\w+)"`', section))
    assert len(named) == 7
    Plan(Pool(8, 4), 2, formats=sorted(named))
