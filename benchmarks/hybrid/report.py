"""The measured hits as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.hybrid.measure import Found
from kvpool.config import format_nbytes


def as_json(one: Found) -> dict[str, Any]:
    """One result, ready for JSON."""
    return {
        "model": one.setting.model,
        "trace": one.setting.trace,
        "requests": one.setting.requests,
        "policy": one.policy,
        "budget": f"U/{one.divisor}",
        "nbytes": one.nbytes,
        "hit_tokens": one.hit_tokens,
        "shareable_tokens": one.shareable_tokens,
        "prompt_tokens": one.prompt_tokens,
        "share": one.share,
    }


def as_text(measured: Sequence[Found]) -> str:
    """Return a table per model and trace: hit tokens over shareable tokens, a line per policy."""
    tables = []
    for setting in dict.fromkeys(one.setting for one in measured):
        here = [one for one in measured if one.setting == setting]
        budgets = {one.divisor: one.nbytes for one in here}
        header = ["policy", *(f"U/{divisor}" for divisor in budgets)]
        lines = [header, ["", *map(format_nbytes, budgets.values())]]
        for policy in dict.fromkeys(one.policy for one in here):
            shares = {one.divisor: f"{one.share:.4f}" for one in here if one.policy == policy}
            lines.append([policy, *(shares[divisor] for divisor in budgets)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = "\n".join(
            "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )
        facts = f"{here[0].prompt_tokens:,} prompt tokens, {here[0].shareable_tokens:,} shareable"
        tables.append(f"{setting.model} on the first {setting.requests:,} requests of {setting.trace}: {facts}\n{rows}")
    return "\n\n".join(tables)
