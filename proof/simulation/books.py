"""What the host of `proof.simulation.simulator` knows: its requests, its steps in flight, and what it has counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proof.simulation.device import Work
from proof.simulation.layers import Layers


@dataclass
class Tally:
    """Counters of what happened."""

    steps: int = 0
    tokens: int = 0
    reads: int = 0  # tokens that were read and compared
    hits: int = 0  # tokens found in the prefix cache
    copies: int = 0
    forks: int = 0
    aborts: int = 0
    preemptions: int = 0
    sends: int = 0  # transfers of blocks to somebody else
    lost: int = 0  # completions that never arrived
    rollbacks: int = 0
    forbidden: int = 0  # rollbacks that a fork forbade
    refused: int = 0  # calls that were made at the wrong moment
    resets: int = 0
    let_go: int = 0  # blocks that left tables of sequences which go on, behind a window
    states: int = 0  # states that a step wrote to another slot than it read
    out_of_order: int = 0
    compactions: int = 0
    evicted: int = 0  # tokens that left sequences which go on
    cut: int = 0  # tokens cut off: drafts that were not accepted, and what clients took back

    def describe(self) -> str:
        """One line."""
        return ", ".join(f"{value:,} {name}" for name, value in vars(self).items() if isinstance(value, int))


@dataclass(eq=False, slots=True)
class Request:
    """A sequence that is served, or waits to be."""

    tokens: list[int]  # known content, computed or not
    stamps: list[int]  # one per token
    target: int  # length at which it is finished
    namespace: bytes
    handle: int = -1
    length: int = 0  # tokens scheduled
    passed: int = 0  # most tokens that a step left with it which has passed
    tables: list[set[int]] = field(default_factory=list)  # blocks of its tables after the last call, group by group
    committed: int = 0
    ticket: int = -1  # newest work that its content depends on
    drafting: bool = False
    gone: int = 0  # tokens that left; none of the lengths here counts them
    least: int = 0  # length below which nothing can be cut any more
    salt: int = 0  # of the stamps of what it computes, since tokens left
    wish: tuple[int, int] | None = None  # length to compact to, and tokens that stay in front
    #: (flight, length before it), for what is done so far
    flights: list[tuple[Flight, int]] = field(default_factory=list)

    def state(self) -> str:
        """What an abort interrupts: where the request is, and what the device still does for it."""
        if self.handle < 0:
            return "waiting"
        if not self.flights:
            return "decode" if self.length >= len(self.tokens) else "prefill"
        rows = [flight for flight, _ in self.flights if flight.rows_have(self)]
        if self.drafting:
            return "drafts in flight"
        if not rows:
            return "fork of a row in flight"
        return "prefill in flight" if self.length < len(self.tokens) else "decode in flight"

    def done_length(self) -> int:
        """Tokens that no pending step has still to write."""
        return min([self.length, *(before for _, before in self.flights)])


@dataclass(eq=False, slots=True)
class Row:
    """A request in a step, and what it was before."""

    request: Request
    handle: int
    length: int
    num_known: int  # tokens known before the step sampled more
    drafts: int = 0


@dataclass(eq=False, slots=True)
class Flight:
    """A step that the host does not know to be over."""

    plan: Any
    work: Work
    rows: list[Row]
    fork_mark: int  # forks made before it
    executed: bool = False
    noted: bool = False
    over: bool = False

    def rows_have(self, request: Request) -> bool:
        """Tell whether the request is a row, not only a fork of one."""
        return any(row.handle == request.handle for row in self.rows)


@dataclass(eq=False, slots=True)
class Send:
    """Blocks that somebody else reads, and what they hold."""

    layers: Layers
    table: np.ndarray
    left: np.ndarray  # entries that are there
    stamps: list[int]
    low: int  # the first token behind those that were let go
