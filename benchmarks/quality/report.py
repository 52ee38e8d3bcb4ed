"""How the answers are shown: tables for people, one JSON object for machines."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import kvpool
from benchmarks.attention.report import Lines, print_table
from benchmarks.gate import Gate, as_text, held
from benchmarks.quality.answers import Quality
from benchmarks.quality.settings import Settings
from benchmarks.quality.tables import Question, Table
from kvpool.cli.console import cpu_model

TITLES = {
    "policies": "Policies, at a budget of a quarter of the context",
    "heavy": "Heavy hitters or the newest, at a budget of half of the context",
    "max_kv": "Budgets (max_kv)",
    "length": "Lengths, at the same budget",
    "bits": "Bits of K and V",
}
HEAD = ("tokens", "policy", "max_kv", "heavy", "bits", "perplexity", "of code", "recall", "KV bytes")


def lines(table: Table) -> Lines:
    """Return a table's rows as text, its head first; per cent are beside everything kept in as many tokens."""
    whole = {q.length: quality for q, quality in table if q.policy.kind == "unlimited" and q.policy.bits == "16/16"}
    found: Lines = [HEAD]
    for question, quality in table:
        policy, base = question.policy, whole.get(question.length)
        found.append(
            (
                *(str(question.length), policy.name, str(policy.max_kv or "-"), str(policy.heavy or "-"), policy.bits),
                beside(quality.perplexity, base.perplexity if base else None),
                beside(quality.code_perplexity, base.code_perplexity if base else None),
                f"{quality.recall.mean():.1%}",
                f"{quality.nbytes:,.0f}",
            )
        )
    return found


def beside(value: float, base: float | None) -> str:
    """Return a perplexity, and by how much it is more than the base."""
    return f"{value:.3f}" if base is None or base == value else f"{value:.3f} ({value / base - 1:+.1%})"


def show(
    model: str,
    tables: Mapping[str, Table],
    gates: Sequence[Gate],
) -> None:
    """Print all tables, and which gates hold."""
    print(f"{cpu_model()}; {model}\n")
    for name, table in tables.items():
        print_table(TITLES[name], lines(table))
    if gates:
        print(as_text(gates))


def row(question: Question, quality: Quality) -> dict[str, Any]:
    """Return one row for machines."""
    policy = question.policy
    return {"tokens": question.length, "policy": policy.name} | asdict(policy) | quality.as_json()


def as_json(
    settings: Settings,
    model: str,
    tables: Mapping[str, Table],
    gates: Sequence[Gate],
    seconds: float,
) -> dict[str, Any]:
    """Return everything that was measured, and on what."""
    return {
        "kvpool": kvpool.__version__,
        "machine": {"platform": platform.platform(), "cpu": cpu_model()},
        "model": model,
        "settings": asdict(settings) | {"cache": str(settings.cache)},
        "tables": {name: [row(*pair) for pair in table] for name, table in tables.items()},
        "gates": [gate.as_json() for gate in gates],
        "held": held(gates),
        "seconds": round(seconds, 1),
    }
