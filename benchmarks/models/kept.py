"""`Kept`: results of gates in a file. A later run measures only what is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.gate import Gate

FIELDS = ("name", "value", "limit", "at_most", "note", "unit", "goal")


class Kept:
    """What was measured before, and a line of JSON in the file for what is measured now.

    Parameters
    ----------
    path : Path or None
        None: nothing is kept.
    repetitions : int
        Of this run. A result with another number of repetitions is measured again.
    say : callable
        Gets a line for each gate, also for those from the file.
    """

    def __init__(self, path: Path | None, repetitions: int, say: Callable[[str], None]) -> None:
        self._path, self._repetitions, self._say = path, repetitions, say
        self._found: dict[str, Gate] = {}
        text = path.read_text() if path is not None and path.exists() else ""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):  # the run ended while it wrote the line
                path.write_text(text.removesuffix(line))
                break
            found = json.loads(line)
            if found.pop("repetitions") == repetitions:
                self._found[found["name"]] = Gate(**found)

    def gates(self, names: tuple[str, ...], measure: Callable[[], tuple[Gate, ...]]) -> tuple[Gate, ...]:
        """Return the gates of these names: as they stand in the file, or measured now, all of them."""
        if not all(name in self._found for name in names):
            for gate in measure():
                self._found[gate.name] = gate
                if self._path is not None:
                    line = {name: getattr(gate, name) for name in FIELDS} | {"repetitions": self._repetitions}
                    with self._path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        found = tuple(self._found[name] for name in names)
        for gate in found:
            value = "not decided" if gate.value is None else f"{gate.value:.3f}"
            self._say(f"{gate.name}: {value}  {gate.note}".rstrip())
        return found
