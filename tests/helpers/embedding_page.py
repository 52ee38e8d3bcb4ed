"""The examples of docs/embedding.md, by what they need."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "embedding.md").read_text()
LINES_MAX = 60


def examples(needs=""):
    """Code of the blocks that say they need this."""
    found = re.findall(rf"^```python{' ' + needs if needs else ''}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found and all(code.count("\n") <= LINES_MAX for code in found)
    return found
