"""Replays of hybrid models for people, as text, and for machines, as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.config import format_nbytes
from kvpool.replay.hybrid_shapes import HybridShape
from kvpool.replay.loop import Result
from kvpool.replay.report import aligned, percent, table


def shape_facts(shape: HybridShape) -> dict[str, Any]:
    """Return what a model keeps, ready for JSON."""
    return {
        "block_size": shape.block_size,
        "block_nbytes": shape.block_nbytes,
        "grain": shape.grain,
        "token_nbytes": shape.token_nbytes,
        "checkpoint_nbytes": shape.checkpoint_nbytes,
        "groups": [
            {"name": name, "tokens": shape.entry_tokens(index), "blocks": shape.entry_blocks(index)}
            for index, name in enumerate(shape.names())
        ],
    }


def hybrid_facts(result: Result, shape: HybridShape) -> dict[str, Any]:
    """Return everything a replay through a pool counted, ready for JSON. Costs are nanoseconds."""
    return {
        "policy": result.policy,
        "num_blocks": result.num_blocks,
        "nbytes": result.num_blocks * shape.block_nbytes,
        "concurrency": result.concurrency,
        **result.counters,
        "hit_rate": result.hit_rate,
        "ns_per_operation": result.ns_per_operation,
        "calls": {verb: {"calls": calls, "ns": ns} for verb, (calls, ns) in result.costs.items()},
    }


def describe_shape(model: str, shape: HybridShape) -> str:
    """Return one line about a model."""
    return (
        f"{model}: {format_nbytes(shape.token_nbytes)} a token in full layers,"
        f" {format_nbytes(shape.checkpoint_nbytes)} a checkpoint; hits are multiples of {shape.grain} tokens"
    )


def describe_hybrid(facts: dict[str, Any]) -> str:
    """Return one replay through a pool as aligned lines, from its facts."""
    title = (
        f"P3, prefix cache with layer groups: {facts['num_blocks']:,} blocks, {format_nbytes(facts['nbytes'])},"
        f" at most {facts['concurrency']} requests at a time"
    )
    written = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in facts["written_nbytes"].items())
    taken, wanted = facts["checkpoints_taken"], facts["checkpoints_wanted"]
    rows = [
        *_hit_rows(facts),
        ("different tokens", f"{format_nbytes(facts['unique_nbytes'])} of full attention in all prompts"),
        ("checkpoints", f"{taken:,} taken of {wanted:,} wanted; {facts['checkpoint_hits']:,} admissions began at one"),
        ("written", written),
        ("evictions", f"{facts['evictions']:,} of {facts['allocs']:,} blocks taken"),
        ("preemptions", f"{facts['preemptions']:,}"),
        ("requests", f"{facts['finished']:,} finished, {facts['rejected']:,} rejected (too long for the pool)"),
        ("allocator", f"{facts['ns_per_operation']:,.0f} ns per block operation"),
    ]
    return aligned(title, rows)


def describe_split(facts: dict[str, Any]) -> str:
    """Return one replay of H1 as aligned lines, from its facts."""
    title = (
        f"H1, two arenas: {facts['num_blocks']:,} blocks of {facts['block_size']} tokens,"
        f" {facts['room']:,} {facts['room_holds']}, at most {facts['concurrency']} requests at a time"
    )
    used = f", {facts['checkpoints_used']:,} used" if "checkpoints_used" in facts else ""
    rows = [
        *_hit_rows(facts),
        ("checkpoints", f"{facts['checkpoints_taken']:,} taken{used}"),
        ("evictions", f"{facts['kv_evictions']:,} blocks of KV"),
        ("requests", f"{facts['admissions']:,} admitted, {facts['rejected']:,} rejected (too long for the arena)"),
    ]
    return aligned(title, rows)


def _first_hits(facts: dict[str, Any]) -> int:
    """Hit tokens without what a preempted request finds of itself; H1 preempts nobody."""
    hits: int = facts.get("first_hit_tokens", facts["hit_tokens"])
    return hits


def _hit_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    hits, shareable = _first_hits(facts), facts["shareable_tokens"]
    share = percent(hits / shareable) if shareable else "nothing"
    return [
        ("hits", f"{hits:,} tokens, {share} of the {shareable:,} that an earlier request had"),
        ("computed tokens", f"{facts['computed_tokens']:,}"),
    ]


SWEEP_COLUMNS = {
    "blocks": lambda facts: f"{facts['num_blocks']:,}",
    "hits": lambda facts: f"{_first_hits(facts):,}",
    "of shareable": lambda facts: percent(_first_hits(facts) / max(facts["shareable_tokens"], 1)),
    "computed": lambda facts: f"{facts['computed_tokens']:,}",
    "checkpoints": lambda facts: f"{facts['checkpoints_taken']:,}",
    "rejected": lambda facts: f"{facts['rejected']:,}",
}
POOL_COLUMNS = {
    "bytes": lambda facts: format_nbytes(facts["nbytes"]),
    "began at one": lambda facts: f"{facts['checkpoint_hits']:,}",
    "evictions": lambda facts: f"{facts['evictions']:,}",
    "preempted": lambda facts: f"{facts['preemptions']:,}",
}


def describe_hybrid_sweep(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line per budget."""
    return table(SWEEP_COLUMNS | (POOL_COLUMNS if runs[0]["policy"] == "P3" else {}), runs)
