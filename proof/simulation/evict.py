"""Eviction in `proof.simulation.simulator`: tokens leave sequences that go on, while steps are in flight.

The books keep what is left of a request as if it had never had more, and how many tokens have gone. What it computes
from then on has stamps of its own: nobody else may ever read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import OutOfBlocks
from proof.simulation.books import Request, Row
from proof.simulation.device import Move, Violation

if TYPE_CHECKING:
    from proof.simulation.host import Host


def compact(host: Host) -> None:
    """Tokens of any places leave a request, after copies were made of what others read."""
    request = draw(host)
    if request is None:
        return
    if request.wish is None or request.wish[0] >= request.length:
        target = host.rng.randint(0, request.length - 1)
        request.wish = target, host.rng.randint(0, target)
    target, first = request.wish
    try:
        shrink(host, request, target, first)
        return
    except ValueError:
        plan, row = host.spare[-1] if host.spare else None, Row(request, request.handle, *sizes(request))
    if plan is None:
        return
    try:
        host.pool.unshare(plan, [request.handle], target, first)
    except OutOfBlocks:
        return
    host.launch(plan, [row], [0])
    flight = host.flights[-1]
    if host.rng.random() < 0.5:
        host.sync(flight)
        if flight.over:
            shrink(host, request, target, first)  # now nothing is in the way
    elif host.rng.random() < 0.5:
        host.tell(request)  # while its copies are in flight


def sizes(request: Request) -> tuple[int, int]:
    """Of a row: length, tokens known."""
    return request.length, len(request.tokens)


def shrink(host: Host, request: Request, target: int, first: int) -> None:
    """Tell the pool, and give the device what has to move; ValueError from the pool changes nothing."""
    table = host.pool.table(request.handle)
    host.pool.compact(request.handle, target, first)
    keep = [*range(first), *sorted(host.rng.sample(range(first, request.length), target - first))]
    host.ticket += 1
    host.device.submit_move(Move(host.ticket, table, keep))
    host.log.append(f"compact {request.handle} {keep} of {request.length}")
    request.ticket = host.ticket
    host.tally.compactions += 1
    left(host, request, keep)


def evict_blocks(host: Host) -> None:
    """Whole blocks leave a request, and nothing moves."""
    request = draw(host)
    size = host.shape.block_size
    if request is None or request.length < size:
        return
    full = range(request.length // size)
    indices = sorted(host.rng.sample(full, host.rng.randint(1, len(full))))
    host.pool.evict_blocks(request.handle, indices)
    host.log.append(f"evict blocks {request.handle} {indices}")
    left(host, request, [at for at in range(request.length) if at // size not in indices])


def draw(host: Host) -> Request | None:
    """A request that has tokens and is in no step; forks of rows in flight too."""
    idle = [r for r in host.idle() if r.length]
    return host.rng.choice(idle) if idle else None


def left(host: Host, request: Request, keep: list[int]) -> None:
    """Only these tokens are left."""
    gone = request.length - len(keep)
    pending = slice(request.length, None)
    host.tally.evicted += gone
    request.tokens = [*(request.tokens[at] for at in keep), *request.tokens[pending]]
    request.stamps = [request.stamps[at] for at in keep]
    request.flights = [(flight, sum(at < before for at in keep)) for flight, before in request.flights]
    request.length = len(keep)
    host.look(request)
    request.gone += gone
    request.wish = None
    request.least = len(keep)
    request.salt = host.tally.evicted  # grows with every one of them
    host.stamps.extend(request.stamps, request.tokens[len(keep) :], request.namespace, request.salt)
    if host.pool.kv_len(request.handle) != request.length:
        raise Violation(f"{host.pool.kv_len(request.handle)} tokens of {request.handle} stay, {request.length} should")
