"""Conformance cases about steps: what `prepare` makes, how long it is good for, and what an engine's framework needs.

`kvpool.testing.conformance` is the kit they belong to.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from kvpool.protocol import StepArrays
from kvpool.testing.filled import (
    Case,
    Factory,
    attend,
    close,
    collector,
    everything,
    fill,
    same_bytes,
    specs,
    values,
)

CASES: list[Case] = []
_case = collector(CASES)


@_case
def capabilities_are_a_constant(factory: Factory) -> None:
    """One object, made once; what a backend queues is there to be evaluated, and `settle` waits for it."""
    for spec in specs(factory):
        backend = factory(spec, 3)
        can = backend.capabilities
        assert can is backend.capabilities and can == factory(spec, 3).capabilities, "capabilities are made anew"
        assert can.lazy or not len(backend.queued(0)), "something is queued, but the backend is not lazy"
        assert isinstance(backend.settle(), int), "settle returns how many arrays moved"


@_case
def prepare_changes_nothing(factory: Factory) -> None:
    """A plan may be prepared early, twice, and for nothing."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [9, 4]), [2, 1]
        plan, before = filled.plan(q_lens), everything(filled.backend)
        steps = [filled.backend.prepare(plan) for _ in range(2)]
        same_bytes(everything(filled.backend), before, "prepare")
        q = filled.queries(q_lens, 4)
        for step in steps:
            out = filled.backend.to_numpy(filled.backend.attend(step, 1, filled.backend.asarray(q)))
            close(out, filled.expected(1, q, q_lens), spec, "a plan that was prepared twice")


@_case
def steps_are_used_side_by_side(factory: Factory) -> None:
    """Two plans in turn, each prepared before the other one's writes and reads."""
    for spec in specs(factory):
        filled, lens = fill(factory, spec, [9, 12]), [(3, 0), (0, 5)]
        backend, plans = filled.backend, [filled.plan(q_lens) for q_lens in lens]
        steps = [backend.prepare(plan) for plan in plans]
        for layer in range(spec.num_layers):
            for row, (step, q_lens) in enumerate(zip(steps, lens, strict=True)):
                k, v = (x[layer][row][-sum(q_lens) :] for x in (filled.given_k, filled.given_v))
                backend.write(step, layer, backend.asarray(k), backend.asarray(v))
                q = filled.queries(q_lens, 4)
                out = backend.to_numpy(backend.attend(step, layer, backend.asarray(q)))
                close(out, filled.expected(layer, q, q_lens), spec, f"step {row} of two")


@_case
def calls_do_not_depend_on_the_plan_afterwards(factory: Factory) -> None:
    """The arrays of a plan are those of its next step when what was queued runs."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [9, 12]), [2, 3]
        backend, given = filled.backend, filled.plan(q_lens)
        plan = StepArrays(*(np.array(getattr(given, field.name)) for field in fields(given)))
        step, q = backend.prepare(plan), filled.queries(q_lens, 4)
        k, v = (
            np.concatenate([values(filled.rng, (n, spec.num_kv_heads, dim), spec.dtype) for n in q_lens])
            for _, dim in spec.planes
        )
        backend.write(step, 0, backend.asarray(k), backend.asarray(v))
        out = backend.attend(step, 0, backend.asarray(q))
        for array in (plan.block_tables, plan.seq_lens, plan.cu_q_lens, plan.slot_mapping):
            array[:] = 0
        for kept, new in ((filled.k, k), (filled.v, v)):
            kept[0] = [np.concatenate([kept[0][0][:-2], new[:2]]), np.concatenate([kept[0][1][:-3], new[2:]])]
        close(backend.to_numpy(out), filled.expected(0, q, q_lens), spec, "a plan that went on")


@_case
def contexts_are_read(factory: Factory) -> None:
    """`read`: keys and values of all rows in logical order; values past the end of a row are 0."""
    for spec in specs(factory, block_sizes=(3, 8)):
        filled = fill(factory, spec, [1, 8, 13])
        step = filled.backend.prepare(filled.plan([1, 0, 2]))
        for layer in range(spec.num_layers):
            k, v = map(filled.backend.to_numpy, filled.backend.read(step, layer))
            assert k.shape == (3, spec.num_kv_heads, 13, spec.head_dim), f"keys have the shape {k.shape}"
            for row, n in enumerate(filled.contexts):
                for x, stored in ((k, filled.k), (v, filled.v)):
                    assert np.array_equal(x[row, :, :n].swapaxes(0, 1), stored[layer][row]), f"row {row} is another"
                assert not v[row, :, n:].any(), f"values past the end of row {row} are not 0"


@_case
def some_queries_are_attended_alone(factory: Factory) -> None:
    """`StepArrays.of_queries`: each query is a row of its own, and gets what it got among the others."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [5, 16, 9]), [2, 0, 9]
        q, plan, tokens = filled.queries(q_lens, 4), filled.plan(q_lens), np.array([1, 2, 10])
        out = attend(filled.backend, 0, q[tokens], StepArrays.of_queries(plan, tokens))
        expected = filled.expected(0, q, q_lens)
        close(out, type(expected)(*(x[tokens] for x in expected)), spec, "some queries")
