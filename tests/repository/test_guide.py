"""docs/guide.md and docs/mlx-lm.md do what they say: their programs run, and print what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page, language):
    """Code of a page, in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def test_guide_prints_what_it_shows(capsys):
    code = "".join(blocks("guide.md", "python"))
    exec(compile(code, "guide.md", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out == "".join(blocks("guide.md", "text"))


def test_variable_that_the_guide_names_leaves_openblas_one_thread():
    pytest.importorskip("threadpoolctl")
    (name,) = re.findall(r"^Set `(\w+)=1`", (DOCS / "guide.md").read_text(), re.MULTILINE)
    code = "import numpy, threadpoolctl as t; print([x['num_threads'] for x in t.threadpool_info()])"
    found = [
        subprocess.run([sys.executable, "-c", code], env={name: count}, capture_output=True, text=True, check=True)
        for count in ("1", "2")
    ]
    assert [one.stdout for one in found] in (["[1]\n", "[2]\n"], ["[]\n"] * 2)  # none: numpy has another BLAS


def test_engines_of_the_page_on_mlx_lm_run(capsys):
    pytest.importorskip("mlx_lm")
    found = [code for code in blocks("mlx-lm.md", "python") if "Engine" in code]
    assert len(found) == 2
    for code in found:
        exec(compile(code, "mlx-lm.md", "exec"), {"__name__": "page"})
        assert len(capsys.readouterr().out) > 20
