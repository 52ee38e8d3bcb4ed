"""A replay's results for people, as text, and for machines, as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gate import table
from benchmarks.replay.results import Result
from benchmarks.replay.shapes import HybridShape
from benchmarks.replay.trace import Trace
from kvpool.config import format_nbytes

GOOD_SHARE = 0.95
"""Of the best hit rate in a sweep: what a smaller pool may lose to be called enough."""


def trace_facts(trace: Trace) -> dict[str, Any]:
    """Return what a trace holds, ready for JSON."""
    return {
        "name": trace.name,
        "requests": len(trace),
        "block_size": trace.block_size,
        "prompt_tokens": int(trace.prompts.sum()),
        "output_tokens": int(trace.outputs.sum()),
    }


def result_facts(result: Result, shape: HybridShape | None = None) -> dict[str, Any]:
    """Return everything a replay counted, ready for JSON."""
    facts = {
        "num_blocks": result.num_blocks,
        "block_size": result.block_size,
        "concurrency": result.concurrency,
        **result.counters,
        "hit_rate": result.hit_rate,
    }
    return facts if shape is None else facts | {"nbytes": result.num_blocks * shape.block_nbytes}


def describe_trace(trace: Trace) -> str:
    """Return one line on a trace."""
    ids = f"hash ids per {trace.block_size} tokens" if len(trace.ids) else "no hash ids"
    return (
        f"{trace.name}: {len(trace):,} requests, {trace.prompts.sum():,} prompt tokens,"
        f" {trace.outputs.sum():,} output tokens, {ids}"
    )


def describe(result: Result, shape: HybridShape | None = None) -> str:
    """Return one replay as aligned lines."""
    facts = result_facts(result, shape)
    if shape is not None:
        return _describe_groups(facts)
    pool = f"{result.num_blocks:,} blocks of {result.block_size} tokens"
    title = f"Prefix cache: {pool}, at most {result.concurrency} requests at a time"
    looked_up = facts["hit_tokens"] + facts["computed_tokens"] + facts.get("loaded_tokens", 0)
    first = percent(facts["first_hit_rate"])
    rows = [
        ("hit rate", f"{percent(facts['hit_rate'])} of {looked_up:,} tokens; at first admissions {first}"),
        *([("loaded tokens", f"{facts['loaded_tokens']:,}")] if "loaded_tokens" in facts else ()),
        ("computed tokens", f"{facts['computed_tokens']:,}"),
        *_rows_of_all(facts),
        ("generated tokens", f"{facts['decode_tokens']:,} in {facts['steps']:,} steps"),
        ("blocks in use", f"{facts['peak_used']:,} at the peak"),
    ]
    return aligned(title, rows)


def _rows_of_all(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of any replay."""
    return [
        ("evictions", f"{facts['evictions']:,} of {facts['allocs']:,} blocks taken"),
        ("preemptions", f"{facts['preemptions']:,}"),
        ("requests", f"{facts['finished']:,} finished, {facts['rejected']:,} rejected (too long for the pool)"),
    ]


def aligned(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a title and lines of names and texts below it."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "blocks": lambda facts: f"{facts['num_blocks']:,}",
    "hits": lambda facts: f"{facts['first_hit_tokens']:,}",
    "of shareable": lambda facts: percent(facts["first_hit_tokens"] / max(facts["shareable_tokens"], 1)),
    "hit rate": lambda facts: percent(facts["hit_rate"]),
    "at first": lambda facts: percent(facts["first_hit_rate"]),
    "computed": lambda facts: f"{facts['computed_tokens']:,}",
    "checkpoints": lambda facts: f"{facts['checkpoints_taken']:,}",
    "began at one": lambda facts: f"{facts['checkpoint_hits']:,}",
    "evictions": lambda facts: f"{facts['evictions']:,}",
    "preempted": lambda facts: f"{facts['preemptions']:,}",
    "rejected": lambda facts: f"{facts['rejected']:,}",
    "bytes": lambda facts: format_nbytes(facts["nbytes"]),
    "steps": lambda facts: f"{facts['steps']:,}",
    "peak used": lambda facts: f"{facts['peak_used']:,}",
}
OF_GROUPS = ("hits", "of shareable", "checkpoints", "began at one", "bytes")
NOT_OF_GROUPS = ("hit rate", "at first", "steps", "peak used")


def describe_sweep(results: list[Result], shape: HybridShape | None = None) -> str:
    """Return a table with a line per pool size, and without layer groups the smallest pool that is enough."""
    left_out = OF_GROUPS if shape is None else NOT_OF_GROUPS
    columns = {name: show for name, show in COLUMNS.items() if name not in left_out}
    facts = [result_facts(result, shape) for result in results]
    lines = table(list(columns), *([show(each) for show in columns.values()] for each in facts))
    if shape is not None:
        return lines
    enough = smallest_enough(results)
    if enough is None:
        return f"{lines}\nNo pool here serves all without preemption at nearly the best hit rate: try larger ones."
    return (
        f"{lines}\n{enough.num_blocks:,} blocks ({enough.num_blocks * enough.block_size:,} tokens) are enough: nothing"
        f" preempted or rejected, {percent(enough.counters['first_hit_rate'])} hits at first admissions"
        f" (at least {GOOD_SHARE:.0%} of the best here)."
    )


def smallest_enough(results: list[Result]) -> Result | None:
    """Return the smallest pool that preempts and rejects nothing and has nearly the best hit rate, or None.

    The hit rate of first admissions: what a preempted request finds of itself is not a gain.
    """
    counters = {result: result.counters for result in results}
    goal = GOOD_SHARE * max(counted["first_hit_rate"] for counted in counters.values())
    fitting = [
        result
        for result, counted in counters.items()
        if counted["first_hit_rate"] >= goal and counted["preemptions"] == counted["rejected"] == 0
    ]
    return min(fitting, key=lambda result: result.num_blocks, default=None)


def percent(fraction: float) -> str:
    """``0.9512`` as ``"95.1 %"``."""
    return f"{100 * fraction:.1f} %"


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


def describe_shape(model: str, shape: HybridShape) -> str:
    """Return one line about a model."""
    return (
        f"{model}: {format_nbytes(shape.token_nbytes)} a token in full layers,"
        f" {format_nbytes(shape.checkpoint_nbytes)} a checkpoint; hits are multiples of {shape.grain} tokens"
    )


def _describe_groups(facts: dict[str, Any]) -> str:
    """Return one replay through a pool with layer groups as aligned lines."""
    title = (
        f"Prefix cache with layer groups: {facts['num_blocks']:,} blocks, {format_nbytes(facts['nbytes'])},"
        f" at most {facts['concurrency']} requests at a time"
    )
    written = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in facts["written_nbytes"].items())
    taken, wanted = facts["checkpoints_taken"], facts["checkpoints_wanted"]
    hits, shareable = facts["first_hit_tokens"], facts["shareable_tokens"]
    share = percent(hits / shareable) if shareable else "nothing"
    rows = [
        ("hits", f"{hits:,} tokens, {share} of the {shareable:,} that an earlier request had"),
        ("computed tokens", f"{facts['computed_tokens']:,}"),
        ("different tokens", f"{format_nbytes(facts['unique_nbytes'])} of full attention in all prompts"),
        ("checkpoints", f"{taken:,} taken of {wanted:,} wanted; {facts['checkpoint_hits']:,} admissions began at one"),
        ("written", written),
        *_rows_of_all(facts),
    ]
    return aligned(title, rows)
