"""Calls that `proof.simulation.simulator` makes at the wrong moment: each must be refused, and change nothing.

They go by what the host knows: a plan in flight, a row in flight, a step that is not the newest, a dead handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.errors import PlanStateError, StaleHandle
from proof.simulation.device import Violation

if TYPE_CHECKING:
    from proof.simulation.books import Request
    from proof.simulation.host import Host

Wrong = tuple[str, type[Exception], Callable[[], Any]]


def wrong_calls(host: Host) -> Iterator[Wrong]:
    """Yield what would be wrong now, as (name, exception, call)."""
    pool, flights = host.pool, host.flights
    if flights and not host.shape.in_order:
        flight = host.rng.choice(flights)
        yield "step on a plan in flight", PlanStateError, lambda: pool.step(flight.plan, [], 0)
        if flight.noted:
            yield "done twice", PlanStateError, lambda: pool.done(flight.plan)
        if flight is not flights[-1]:
            yield "rollback of an older step", PlanStateError, lambda: pool.rollback(flight.plan)
        row = host.rng.choice(flight.rows)
        if row.request.handle == row.handle:
            least = row.request.least + row.request.gone
            yield "truncate in flight", PlanStateError, lambda: pool.truncate(row.handle, least)
            groups = pool.options.groups
            evicting = PlanStateError if groups is None or groups[0].kind == "full" else ValueError
            yield "compact in flight", evicting, lambda: pool.compact(row.handle, 0)
            yield "evict_blocks in flight", evicting, lambda: pool.evict_blocks(row.handle, [])
    if host.spare:
        yield "done of a plan not in flight", PlanStateError, lambda: pool.done(host.spare[-1])
    if host.dead >= 0:
        for name in ("table", "close", "fork", "num_tokens"):
            yield f"{name} of the dead", StaleHandle, partial(getattr(pool, name), host.dead)
    if host.running:
        request = host.rng.choice(host.running)
        end = request.length + request.gone
        yield "truncate beyond the end", ValueError, lambda: pool.truncate(request.handle, end + 1)
        yield "compact beyond the end", ValueError, lambda: pool.compact(request.handle, request.length + 1)
        if host.shape.groups:
            yield from wrong_calls_on_groups(host, request)
            return
        known = request.tokens[request.committed : request.length]
        if request.gone:
            if host.shape.prefix_cache:
                yield "commit of what is left", ValueError, lambda: pool.prefix.commit(request.handle, [0])
            if request in host.idle():
                yield "truncate into what left", ValueError, lambda: pool.truncate(request.handle, 0)
            return
        if host.shape.prefix_cache and known and request.done_length() < request.length:
            yield "commit of what is not done", ValueError, lambda: pool.prefix.commit(request.handle, known)


def wrong_calls_on_groups(host: Host, request: Request) -> Iterator[Wrong]:
    """Yield what only pools with layer groups refuse."""
    pool, handle, arenas = host.pool, request.handle, len(host.arenas())
    yield "open with a prompt", ValueError, lambda: pool.open([0])
    yield "a group that is not there", ValueError, lambda: pool.table(handle, len(host.layers))
    yield "an arena that is not there", ValueError, lambda: pool.blocks.arena(arenas)
    if request not in host.idle():
        return
    if host.with_state and request.length:
        yield "truncate of a state", ValueError, lambda: pool.truncate(handle, request.length - 1)
    for layers in host.layers:
        gone = np.flatnonzero((layers.table(pool, handle) < layers.low).any(axis=1))
        if gone.size:
            behind = int(gone[-1]) * layers.size
            yield "truncate behind the window", ValueError, partial(pool.truncate, handle, behind)


def make_wrong_call(host: Host) -> None:
    """Make one of them, and look whether anything changed."""
    calls = list(wrong_calls(host))
    if not calls:
        return
    name, exception, call = host.rng.choice(calls)
    before = host.pool.fingerprint()
    try:
        call()
    except exception:
        host.tally.refused += 1
    else:
        raise Violation(f"{name} was not refused")
    if host.pool.fingerprint() != before:
        raise Violation(f"{name} was refused, but the pool changed")
