"""Mutants that nobody can tell from the core: ``equivalents.txt`` lists them one by one, under the reason.

A line that begins with ``=`` is a reason, for the mutants below it; a line that begins with ``#`` is a remark.
"""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).with_name("equivalents.txt")


def read(text: str) -> dict[str, str]:
    """Key of a mutant -> why it changes nothing that can be seen."""
    found, reason = {}, ""
    for line in text.splitlines():
        if line.startswith("="):
            reason = line[1:].strip()
        elif line.strip() and not line.startswith("#"):
            found[line.strip()] = reason
    return found


EQUIVALENTS = read(LIST.read_text())
