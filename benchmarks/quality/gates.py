"""What has to hold, whatever the tables say."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gate import Gate
from benchmarks.quality.answers import Quality, more
from benchmarks.quality.tables import Table, of

ERRORS = 2.0
LOST = 0.5
INT8 = 0.2


def judge(tables: Mapping[str, Table], context: int) -> list[Gate]:
    """Return all gates, of the tables ``max_kv`` and ``bits``."""
    sweep = tables["max_kv"]
    budgets = sorted({q.policy.max_kv for q, _ in sweep if 0 < q.policy.max_kv <= context // 2})
    found = [
        no_worse(budget, of(sweep, kind="h2o", max_kv=budget), of(sweep, kind="rotating", max_kv=budget))
        for budget in budgets
    ]
    half, whole = context // 2, of(sweep, kind="unlimited")
    for budget in budgets:
        stock, ours = (of(sweep, kind=kind, max_kv=budget) for kind in ("rotating", "h2o"))
        found.append(recall(f"recall at {budget}: H2O heavy", whole, stock, ours, LOST if budget == half else None))
    found.append(blind(whole, of(sweep, kind="rotating", max_kv=half), half))
    return found + [int8(tables["bits"], kind) for kind in ("unlimited", "h2o")]


def no_worse(budget: int, ours: Quality, stock: Quality) -> Gate:
    """H2O heavy loses no more perplexity of code than rotating, and two standard errors."""
    difference, error = more(ours.code_nats, stock.code_nats)
    note = f"perplexity {ours.code_perplexity:.3f} against {stock.code_perplexity:.3f}, {len(ours.nats)} seeds"
    return Gate(f"max_kv {budget}: nats of H2O heavy over rotating's", difference, ERRORS * error, True, note)


def recall(name: str, whole: Quality, stock: Quality, ours: Quality, limit: float | None = LOST) -> Gate:
    """Eviction loses at most half of the recall that rotating loses. Judged at one budget: docs/numbers.md says why."""
    lost, lost_by_stock = (float((whole.recall - q.recall).mean()) for q in (ours, stock))
    note = f"{whole.recall.mean():.1%} unlimited, {stock.recall.mean():.1%} rotating, {ours.recall.mean():.1%}"
    return Gate(
        f"{name} loses, over what rotating loses",
        lost / lost_by_stock if lost_by_stock > 0 else float("nan"),
        limit,
        True,
        note,
    )


def blind(whole: Quality, stock: Quality, budget: int) -> Gate:
    """The task is one: the model does it, and rotating cannot."""
    kept = float(stock.recall.mean() / whole.recall.mean()) if whole.recall.mean() > 0 else float("nan")
    return Gate(
        f"recall at {budget}: of rotating, over unlimited's", kept, 0.5, True, "the window is shorter than the way"
    )


def int8(table: Table, kind: str) -> Gate:
    """K and V in int8 are within 0.2 points of perplexity of float16."""
    dense, packed = (of(table, kind=kind, k_bits=bits, v_bits=bits).perplexity for bits in (None, 8))
    return Gate(
        f"int8 {kind}: points of perplexity from fp16", abs(packed - dense), INT8, True, f"{dense:.3f}, {packed:.3f}"
    )
