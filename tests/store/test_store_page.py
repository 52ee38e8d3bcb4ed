"""docs/store.md: its example runs, and its commands and files are those of the code."""

import re
from pathlib import Path

from kvpool.cli import store as command
from kvpool.store import DiskStore
from kvpool.testing import stores as kit

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "store.md").read_text()


def test_example_of_the_page_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.split("## What every store promises")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/store.md", "exec"), {})


def test_page_has_every_command_and_every_file(tmp_path):
    assert set(re.findall(r"^    kvpool store (\w+) ", PAGE, re.MULTILINE)) == set(command.COMMANDS)
    store = DiskStore(str(tmp_path / "store"), kit.LAYOUT, 1 << 24)
    kit.stores(store, kit.LAYOUT.blocks(kit.prompt(1))[0])
    names = {re.sub("^[0-9a-f]{16}", "<16 hex>", file.name) for file in (tmp_path / "store").iterdir()}
    store.close()
    names |= {re.sub("^[0-9a-f]{16}", "<16 hex>", file.name) for file in (tmp_path / "store").iterdir()}
    assert names == set(re.findall(r"^\| `([^`]+)` ", PAGE.split("### Format")[0], re.MULTILINE))
