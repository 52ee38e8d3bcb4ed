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
from kvpool.cli.machine import cpu_model

TITLES = {
    "policies": "Policies, at a budget of a quarter of the context",
    "heavy": "Heavy hitters or the newest, at a budget of half of the context",
    "max_kv": "Budgets (max_kv)",
    "length": "Lengths, at the same budget",
    "bits": "Bits of K and V",
    "long": "Long documents, one of each length",
    "speed": "Decoding one sequence",
    "layers": "Layers, everything kept",
}
UNIFORM = (
    "Budgets per layer are not offered: others found no gain from them (+1.01 % against +0.94 % in perplexity, "
    "Qwen3-8B at 256 tokens), since layers differ little in the share of their top tokens, which the last table shows."
)
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


def speed_lines(rows: Sequence[dict[str, Any]]) -> Lines:
    """Return the rows of the table of speeds as text."""
    head = ("policy", "max_kv", "bits", "tokens/s", "peak bytes")
    return [
        head,
        *((r["policy"], str(r["max_kv"] or "-"), r["bits"], f"{r['rate']:.1f}", f"{r['peak_nbytes']:,}") for r in rows),
    ]


def layer_lines(rows: Sequence[dict[str, float]]) -> Lines:
    """Return the rows of the table of layers as text."""
    head = ("layer", "entropy, nats", "share of the top 32")
    return [head, *((str(i), f"{row['entropy']:.3f}", f"{row['top_share']:.3f}") for i, row in enumerate(rows))]


def show(
    model: str,
    tables: Mapping[str, Table],
    speed: Sequence[dict[str, Any]],
    layers: Sequence[dict[str, float]],
    gates: Sequence[Gate],
) -> None:
    """Print all tables, and which gates hold."""
    print(f"{cpu_model()}; {model}\n")
    for name, table in tables.items():
        print_table(TITLES[name], lines(table))
    if speed:
        print_table(TITLES["speed"], speed_lines(speed))
    if layers:
        print_table(TITLES["layers"], layer_lines(layers))
    print(UNIFORM)
    if gates:
        print()
        print(as_text(gates))


def row(question: Question, quality: Quality) -> dict[str, Any]:
    """Return one row for machines."""
    policy = question.policy
    return {"tokens": question.length, "policy": policy.name} | asdict(policy) | quality.as_json()


def as_json(
    settings: Settings,
    model: str,
    tables: Mapping[str, Table],
    speed: Sequence[dict[str, Any]],
    layers: Sequence[dict[str, float]],
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
        "speed": list(speed),
        "layers": list(layers),
        "per_layer_budgets": UNIFORM,
        "gates": [gate.as_json() for gate in gates],
        "held": held(gates),
        "seconds": round(seconds, 1),
    }
