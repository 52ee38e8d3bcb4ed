"""What has to hold: of hits lost, beside full attention at equal bytes, beside the policies of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gate import Gate
from benchmarks.hybrid.measure import BOUND, FULL, POOL, VLLM, Found

LOST = {
    ("qwen3_5", "agentic_a"): (1.0, 0.5),
    ("qwen3_5", "mooncake_conversation"): (3.0, 2.2),
    ("gemma4", "agentic_a"): (1.5, 0.6),
    ("gpt_oss", "agentic_a"): (0.5, 0.3),
    ("gpt_oss", "mooncake_conversation"): (2.0, 1.3),
}
"""Percent of the shareable tokens, at U: limit and goal."""

MODEL = "qwen3_5"
"""The limits below are for its states, except that of the best peer."""

OF_FULL = {
    "agentic_a": {1: (0.97, 0.97), 2: (0.97, 0.97), 4: (0.93, 0.945), 8: (0.82, 0.86)},
    "mooncake_conversation": {1: (0.96, 0.975), 2: (0.90, 0.93), 4: (0.86, 0.88), 8: (0.78, 0.81)},
}
OF_BEST = (0.99, 1.0)
OF_VLLM = {
    "agentic_a": {8: (1.3, 1.4)},
    "mooncake_conversation": {2: (1.2, 1.25), 4: (1.25, 1.3)},
}
LOST_OF_VLLM = (0.6, 0.5)
LOST_AT = (1, 2)


def gates_of(measured: Sequence[Found]) -> list[Gate]:
    """Judge what was measured."""
    found = {(one.setting.model, one.setting.trace, one.divisor, one.policy): one for one in measured}
    gates = [_lost(one) for one in measured if one.policy == POOL and one.divisor == 1]
    for one in measured:
        if one.policy == POOL:
            key = (one.setting.model, one.setting.trace, one.divisor)
            others = {name: other for (*place, name), other in found.items() if tuple(place) == key}
            gates.append(_beside_best(one, others))
            gates += _beside_all(one, others) if one.setting.model == MODEL else ()
    return gates


def _place(one: Found) -> str:
    return f"{one.setting.model}, {one.setting.trace} at U/{one.divisor}"


def _lost(one: Found) -> Gate:
    limit, goal = LOST[one.setting.model, one.setting.trace]
    return Gate(f"lost, {_place(one)}", 100 * (1 - one.share), limit, at_most=True, unit="%", goal=goal)


def _beside_best(one: Found, others: dict[str, Found]) -> Gate:
    """Judge the pool beside the best of the other policies for such models."""
    best = max((others[name] for name in others if name not in (POOL, FULL, BOUND)), key=lambda other: other.share)
    limit, goal = OF_BEST
    return Gate(f"hits / best peer, {_place(one)}", one.share / best.share, limit, goal=goal, note=best.policy)


def _beside_all(one: Found, others: dict[str, Found]) -> Iterator[Gate]:
    """Judge the pool beside the others at one budget of one trace."""
    trace, divisor = one.setting.trace, one.divisor
    limit, goal = OF_FULL[trace][divisor]
    yield Gate(f"hits / {FULL}, {_place(one)}", one.share / others[FULL].share, limit, goal=goal)
    if divisor in OF_VLLM[trace]:
        limit, goal = OF_VLLM[trace][divisor]
        yield Gate(f"hits / vLLM, {_place(one)}", one.share / others[VLLM].share, limit, goal=goal)
    if divisor in LOST_AT:
        limit, goal = LOST_OF_VLLM
        ratio = one.avoidable_tokens / others[VLLM].avoidable_tokens
        yield Gate(f"lost / vLLM's, {_place(one)}", ratio, limit, at_most=True, goal=goal)
    yield Gate(f"hits / {BOUND}, {_place(one)}", one.share / others[BOUND].share, None)
