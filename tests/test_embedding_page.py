"""docs/embedding.md does what it says: its examples run. Those of JAX and transformers run in folders of their own."""

import re

import pytest
from embedding_page import PAGE, examples


@pytest.mark.parametrize("code", [*examples(), *examples("mlx")], ids=lambda code: code.split()[1])
def test_example_runs(code):
    exec(code, {"__name__": "example"})


def test_wire_formats_of_the_table_exist():
    from kvpool import Plan, Pool

    section = PAGE.split("## Wire formats")[1].split("\n## ")[0]
    named = set(re.findall(r'`"(\w+)"`', section))
    assert len(named) == 9
    Plan(Pool(8, 4), 2, formats=sorted(named))
