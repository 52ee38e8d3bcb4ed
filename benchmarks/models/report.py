"""The table: one line per model file, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.models import subjects, times
from benchmarks.models.held import held
from benchmarks.models.subjects import Beside
from kvpool.adapters.mlx_lm.host import PagedKV, install
from kvpool.config import format_nbytes

CONTEXTS = {"4k": 4096, "32k": 32768}
BATCH = 8


@dataclass(frozen=True)
class Line:
    """What was found of one model file.

    Attributes
    ----------
    route : str
        How it is served, in a word or two.
    why : str
        Why its attention gathers, or why it does not run. "" otherwise.
    held : dict
        By context and rows.
    decode, chunk : Beside or None
        Of one sequence.
    """

    name: str
    route: str
    why: str = ""
    held: dict[tuple[str, int], Beside] | None = None
    decode: Beside | None = None
    chunk: Beside | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        held = {f"{context} x {rows}": asdict_of(found) for (context, rows), found in (self.held or {}).items()}
        return asdict(self) | {"held": held, "decode": asdict_of(self.decode), "chunk": asdict_of(self.chunk)}


def asdict_of(found: Any) -> dict[str, float] | None:
    """Return a named tuple and its ratio as a dict."""
    return None if found is None else {**found._asdict(), "ratio": found.ratio}


def measure(names: Sequence[str], repetitions: int, say: Callable[[str], None]) -> Iterator[Line]:
    """Measure these files one after the other."""
    for name in names:
        if name in subjects.NOT_RUN:
            yield Line(name, "does not run", subjects.NOT_RUN[name])
            continue
        model = subjects.tiny(name)
        found = {
            (context, rows): held(model, rows, num_tokens)
            for context, num_tokens in CONTEXTS.items()
            for rows in (1, BATCH)
        }
        with times.installed(model, 1, repetitions) if repetitions else install(model, 64) as kv:
            route, why = route_of(kv)
            decode, chunk = times.measure(kv, 1, repetitions) if repetitions else (None, None)
        line = Line(name, route, why, found, decode, chunk)
        say(" | ".join(cells(line)))
        yield line


def route_of(kv: PagedKV) -> tuple[str, str]:
    """Return how a model is served, and why its attention gathers."""
    kinds = {leaf.kind for leaf in kv.layout.leaves}
    way, _, why = kv.route.partition("; opaque: ")[0].partition(": ")
    parts = [{"fused": "fused", "gather": "gathered"}[way]] if kinds & {"full", "window", "chunk"} else []
    parts += ["states"] * ("state" in kinds) + ["held whole"] * ("opaque" in kinds)
    return " + ".join(parts), why if parts[0] == "gathered" else ""


def as_text(lines: Sequence[Line]) -> str:
    """Return the table, what it counts, and the reasons."""
    head = ["file", "served", "4k", "1", str(BATCH), "32k", "1", str(BATCH)]
    head += ["decode", "chunk"] if any(line.decode for line in lines) else []
    rows = [head, ["-" * len(head[0]), "-" * len(head[1]), *["-:"] * (len(head) - 2)]]
    rows += [cells(line)[: len(head)] for line in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    table = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    reasons = [f"- {line.name}: {line.why}" for line in lines if line.why]
    counts: dict[str, int] = {}
    for line in lines:
        counts[line.route] = counts.get(line.route, 0) + 1
    counted = ", ".join(f"{count} {route}" for route, count in sorted(counts.items(), key=lambda item: -item[1]))
    return "\n".join([*table, "", f"{len(lines)} files: {counted}.", "", *reasons])


def cells(line: Line) -> list[str]:
    """Return a row of the table."""
    found = [line.name, line.route]
    for context in CONTEXTS:
        one, batch = (None if line.held is None else line.held[context, rows] for rows in (1, BATCH))
        found += ["" if one is None else format_nbytes(one.stock)]
        found += ["" if each is None else f"{each.ratio:.3f}" for each in (one, batch)]
    return found + ["" if each is None else f"{each.ratio:.2f}" for each in (line.decode, line.chunk)]
