"""Mutants that nobody can tell from the core, each with the reason."""

from __future__ import annotations

from typing import Any

#: (function, part of the statement, was, now) -> why; "*" stands for anything.
EQUIVALENTS: dict[tuple[str, str, str, str], str] = {}


def equivalent(mutant: dict[str, Any]) -> str | None:
    """Why the mutant changes nothing that can be seen, None if it is not on the list."""
    return EQUIVALENTS.get((mutant["function"], mutant["source"], mutant["was"], mutant["now"]))
