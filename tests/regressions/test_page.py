"""README.md and the tests of this folder say the same."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
FAMILIES = {"A": 14, "B": 13, "C": 19, "D": 7, "E": 13, "F": 5, "G": 6, "H": 8, "I": 13, "J": 13, "K": 4}


def rows(text):
    """Id to (reports, what kvpool does, names of tests)."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and re.fullmatch(r"[A-K]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} comes twice"
            found[cells[0]] = cells[1], cells[3], re.findall(r"`(test_\w+)`", cells[4])
    return found


def tests():
    """The names of all tests of the catalogue."""
    paths = HERE.glob("test_regressions_*.py")
    return [name for path in paths for name in re.findall(r"(?m)^def (test_\w+)\(", path.read_text())]


def disagreements(text, functions):
    """What the page says and the tests do not, or the other way round."""
    table = rows(text)
    ids = [f"{family}{n}" for family, count in FAMILIES.items() for n in range(1, count + 1)]
    wrong = [f"{row} is missing" for row in ids if row not in table]
    named = [name for _, _, names in table.values() for name in names]
    wrong += [f"{name} does not exist" for name in named if name not in functions]
    wrong += [f"{name} is not on the page" for name in functions if name not in named]
    for row, (reports, here, names) in table.items():
        own = re.compile(rf"_{row.lower()}_")
        wrong += [f"{name} is not named after {row}" for name in names if not own.search(name)]
        if bool(names) == here.startswith("-") or len(here) < 20:
            wrong.append(f"{row} has tests and is said not to apply, or has neither tests nor a reason")
        if "http" not in reports and "CVE" not in reports and "GHSA" not in reports:
            wrong.append(f"{row} names no report")
    return wrong


def test_page_and_tests_agree():
    assert disagreements(PAGE.read_text(), tests()) == []


def test_page_with_a_missing_name_is_detected():
    text = PAGE.read_text()
    assert "<br>`test_j2_" in text
    assert disagreements(text.replace("<br>`test_j2_", "<br>`", 1), tests())
