"""Quality against memory: a curve for each policy over its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import picture
from benchmarks.quality.tables import Table

CURVES = {
    "rotating": ("rotating (keep 4)", "#d9822b", "s"),
    "block": ("block eviction", "#7a5fb0", "^"),
    "h2o": ("H2O heavy", "#1f6feb", "o"),
}


def draw(path: Path, table: Table, title: str) -> None:
    """Write a PNG of the table ``max_kv``: perplexity of code, and recall, over the bytes of K and V of a sequence.

    Raises
    ------
    OSError
        It cannot be written.
    """
    drawn = picture.Picture(
        (10, 4.6),
        "Quality against memory",
        title,
        grid={"ncols": 2},
        room={"left": 0.075, "right": 0.98, "top": 0.8, "bottom": 0.13, "wspace": 0.22},
    )
    left, right = drawn.panels[0]
    whole = next(quality for question, quality in table if question.policy.kind == "unlimited")
    for axes, name in ((left, "perplexity of code"), (right, "definitions recalled, %")):
        _curves(axes, table, is_recall=axes is right)
        level = 100 * whole.recall.mean() if axes is right else whole.code_perplexity
        axes.axhline(level, color=picture.INK, linewidth=0.9, linestyle=picture.DASHED, label="everything kept")
        picture.name(axes, name, below="K and V of a sequence, KiB")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    right.set_ylim(-4, 104)
    picture.legend(left, loc="best")
    drawn.save(path)


def _curves(axes: Any, table: Table, *, is_recall: bool) -> None:
    for kind, (label, color, marker) in CURVES.items():
        rows = [quality for question, quality in table if question.policy.kind == kind]
        values = [100 * q.recall.mean() if is_recall else q.code_perplexity for q in rows]
        errors = None
        if is_recall and len(rows) and len(rows[0].recall) > 1:
            errors = [100 * float(q.recall.std(ddof=1)) / len(q.recall) ** 0.5 for q in rows]
        axes.errorbar(
            [q.nbytes / 1024 for q in rows], values, yerr=errors,
            color=color, marker=marker, markersize=5, linewidth=1.6, capsize=2, label=label,
        )  # fmt: skip
