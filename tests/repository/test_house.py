"""The tree stays as simple as it has become: no imports in circles or upward, few names, few duplicates."""

import subprocess
import sys
from pathlib import Path

import pytest

import kvpool
from benchmarks import house

ROOT = Path(__file__).resolve().parents[2]
NAMES_MAX = {"kvpool": 17, "Pool": 32, "Plan": 24}


@pytest.fixture(scope="module")
def graph():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    return house.import_graph(ROOT)


def test_imports_form_no_circle(graph):
    assert house.circles(graph) == []


def test_imports_lead_to_no_layer_above(graph):
    assert house.arrows_up(graph) == []


def test_planted_imports_are_found(graph):
    planted = {**graph, "kvpool.errors": graph.get("kvpool.errors", set()) | {"kvpool.scheduler.scheduler"}}
    assert ("kvpool.errors", "kvpool.scheduler.scheduler") in house.arrows_up(planted)
    assert any({"kvpool.errors", "kvpool.scheduler.scheduler"} <= set(circle) for circle in house.circles(planted))


def test_public_names_are_few():
    found = {
        "kvpool": len(kvpool.__all__),
        "Pool": sum(not name.startswith("_") for name in dir(kvpool.Pool)),
        "Plan": sum(not name.startswith("_") for name in dir(kvpool.Plan)),
    }
    assert all(found[name] <= most for name, most in NAMES_MAX.items()), found


def test_few_files_share_six_lines(graph):
    pairs = house.alike(ROOT)
    assert len(pairs) <= 56, sorted(pairs)


def test_readme_is_short_and_docs_end_at_100_columns(graph):
    assert (ROOT / "README.md").read_text().count("\n") <= 110
    pages = [path for path in house.tracked(ROOT) if path.suffix == ".md"]
    assert len(pages) > 10 and {str(p): n for p in pages if (n := house.long_lines(house.text_of(ROOT / p)))} == {}


def test_a_folder_that_is_no_checkout_is_refused_in_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "benchmarks.house", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith(f"{tmp_path} is no checkout of a git repository\n")
