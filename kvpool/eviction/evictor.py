"""`Evictor`: a policy at work on the sequences of a pool: takes scores in, lets tokens leave between two steps.

What one step has seen is kept as it is until the next one begins, so nothing waits for it, and a step that is taken
back leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool._core import Plan, Pool
from kvpool.eviction.memory import Memory
from kvpool.eviction.policies import Policy, check_backend
from kvpool.groups import Group

__all__ = ["Evictor", "Observed"]


@dataclass
class Observed:
    """Queries of a step that are looked at, where a row has several: each is a row of its own that ends with it.

    Attributes
    ----------
    queries : int ``[R]``
        Which of the step's tokens; those of a row stand together, oldest first.
    rows : int ``[R]``
        Of the step, whose table they read.
    lens : int ``[R]``
        Tokens that each of them sees.
    """

    queries: np.ndarray
    rows: np.ndarray
    lens: np.ndarray


class Evictor:
    """The argument ``eviction=`` of `kvpool.Scheduler`: chooses the tokens that leave, and moves the others.

    Parameters
    ----------
    policy : Policy
    pool : kvpool.Pool
    backend : kvpool.protocol.KVBackend
        Holds the pool's keys and values. Every token of a step is written when the next one is scheduled.
    num_rows : int, default 0
        Sequences; `start` makes room for more. In a scheduler a row is a lane.
    group : int, default 0
        Of a pool with layer groups the one that tokens leave: a full one. The backend holds each of its columns.

    Attributes
    ----------
    memory : Memory
    observed : Observed or None
        What `begin` has said of the step that is out. None: the newest query of each row, as `KVBackend.attend` has it.

    Raises
    ------
    TypeError, ValueError
        No policy, no pool; a layer group that is not full; a backend of another block size or another number of
        blocks, or one that exports no such scores or moves no tokens; blocks too large for the policy.

    Notes
    -----
    With columns, layer i of the group is layer ``i % n`` of column ``i // n``, n being those of the backend.

    A runner calls `begin` with every step and `observe` for every layer, with scores of ``policy.kind``; who decides
    that the step counts calls `settle`, or `forget` (`kvpool.Scheduler` does, in `update` and `fail`).
    """

    def __init__(self, policy: Policy, pool: Pool, backend: Any, num_rows: int = 0, group: int = 0) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"[Evictor] policy must be a kvpool.eviction.Policy, not {type(policy).__name__}; a window is a layer "
                "group of the pool, Group.window(window, keep=sink)"
            )
        if not isinstance(pool, Pool):
            raise TypeError(f"[Evictor] pool must be a kvpool.Pool, not {type(pool).__name__}")
        one = _full_group(pool, group)
        spec = backend.spec
        check_backend(policy, backend.capabilities, spec.block_size)
        for name, mine, theirs in (
            ("block_size", spec.block_size, one.block_size or pool.block_size),
            ("num_blocks", backend.num_blocks, pool.stats(one.arena).num_blocks),
        ):
            if mine != theirs:
                raise ValueError(f"[Evictor] {name} is {mine} in the backend, {theirs} in the pool")
        self.policy = policy
        self.pool = pool
        self.backend = backend
        self.group = group
        self._columns = one.columns
        num_layers = one.columns * spec.num_layers
        self.memory = Memory(policy, num_layers, spec.num_kv_heads, spec.block_size, num_rows)
        self._staged: list[Any] = [None] * num_layers
        self._step: tuple[np.ndarray, np.ndarray] | None = None  # rows of the step that is out, lengths after it
        self.observed: Observed | None = None
        self._plan: Plan | None = None

    # ------------------------------------------------------------------------------------------- scores

    def begin(self, rows: np.ndarray, lens: np.ndarray, new: np.ndarray | None = None) -> None:
        """A step begins that has queries in these rows, after which they hold `lens` tokens each.

        Parameters
        ----------
        rows : int ``[S]``
            Row i of what `observe` is given belongs to ``rows[i]``; -1: to nobody.
        lens : int ``[S]``
            ``kv_len`` of each after the step.
        new : int ``[S]``, optional
            Tokens of each in the step. With them chunks are looked at through their newest ``policy.queries``: then
            `observed` says for which queries `observe` is due.
        """
        self.forget()
        rows, lens = np.asarray(rows), np.asarray(lens)
        if new is not None and np.max(new, initial=0) > 1:
            new = np.asarray(new)
            counts = np.minimum(new, self.policy.queries)
            of = np.repeat(np.arange(len(rows)), counts)
            back = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(of))  # from the newest of its row
            self.observed = Observed(np.cumsum(new)[of] - 1 - back, of, lens[of] - back)
            rows, lens = rows[of], self.observed.lens
        self._step = rows, lens

    def observe(self, layer: int, scores: Any) -> None:
        """A layer has seen ``[S, Hk, C]``, as `KVBackend.attend` exports it; with `observed`, ``[R, Hk, C]``."""
        self._staged[layer] = scores

    def forget(self) -> None:
        """The step was taken back."""
        self._step = self.observed = None
        self._staged = [None] * len(self._staged)

    def settle(self) -> None:
        """Take over what the last step has seen."""
        step, staged = self._step, self._staged
        self.forget()
        if step is None or all(scores is None for scores in staged):
            return
        shape = next(scores.shape for scores in staged if scores is not None)
        found = np.zeros((len(staged), *shape), np.float32)
        for layer, scores in enumerate(staged):
            if scores is not None:
                found[layer] = scores
        self.memory.observe(found, step[1], step[0])

    # ------------------------------------------------------------------------------------------- eviction

    def lens_after(self, lens: np.ndarray) -> np.ndarray:
        """Lengths that rows of `lens` tokens have when the next step begins."""
        return self.policy.lens_after(lens, self.memory.block_size)

    @property
    def most(self) -> int:
        """Tokens that a row holds when a step begins, at most."""
        return self.policy.most

    def evict(
        self, handles: Sequence[int], rows: np.ndarray, lens: np.ndarray, after: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """Let tokens leave; `settle` comes first.

        Parameters
        ----------
        handles : ints
            Sequences without a pending step.
        rows : int ``[S]``
        lens, after : int ``[S]``
            ``kv_len`` in the group now, and a smaller one from then on.
        num_tokens : int ``[S]``
            Logical lengths.

        Raises
        ------
        ValueError
            Not as many tokens as the pool says. Nothing has changed.
        OutOfBlocks
            No blocks for copies of shared ones. Nothing has changed.
        PlanStateError, CapacityExceeded
            A row of a pending plan; one that has lost so much that its positions end. No token has left.
        Exception
            What the choice or the backend raises. Before the numbers have changed (no copy, no token moved), or when
            they have, as ``pool.kv_len`` says: then what these sequences hold is not to be read any more.
        """
        numbers = [np.asarray(array).tolist() for array in (rows, lens, after, num_tokens)]
        for i, (handle, held) in enumerate(zip(handles, numbers[1], strict=True)):
            found = self.pool.kv_len(handle, self.group)
            if found != held:
                raise ValueError(f"[evict] lens[{i}] is {held}, the sequence holds {found} tokens")
        # Nothing leaves: it raises for a pending row, before a block is copied.
        self.pool.compact(handles, numbers[1], group=self.group)
        chosen = [self.memory.select(*one) for one in zip(*numbers[:3], strict=True)]
        move = self._evict_blocks if self.policy.whole_blocks else self._compact
        move(handles, chosen, numbers)

    def _evict_blocks(self, handles: Sequence[int], chosen: list[np.ndarray], numbers: list[list[int]]) -> None:
        rows, lens, after, num_tokens = numbers
        # Who will have lost the most goes first: if the pool refuses one because its positions would end, it is this.
        lost = [logical - target for logical, target in zip(num_tokens, after, strict=True)]
        for at in sorted(range(len(lost)), key=lambda at: -lost[at]):
            self.pool.evict_blocks(handles[at], chosen[at], self.group)
            self.memory.evicted(rows[at], lens[at], chosen[at], num_tokens[at])

    def _compact(self, handles: Sequence[int], chosen: list[np.ndarray], numbers: list[list[int]]) -> None:
        rows, lens, after, num_tokens = numbers
        pool, sink = self.pool, self.policy.sink
        self._unshare(handles, after, sink)
        tables = [pool.table(handle, self.group).reshape(-1, self._columns) for handle in handles]
        pool.compact(handles, after, sink, self.group)
        for table, keep, row, now, logical in zip(tables, chosen, rows, lens, num_tokens, strict=True):
            entries = table[: -(-now // self.memory.block_size)]
            for column, layers in enumerate(np.split(keep, self._columns)):
                self.backend.compact(entries[:, column].copy(), layers)
            self.memory.evicted(row, now, keep, logical)

    def _unshare(self, handles: Sequence[int], lens: list[int], sink: int) -> None:
        """Blocks of their own for rows that share what will be rewritten."""
        width = max(-(-self.pool.capacity(handle) // self.pool.block_size) for handle in handles)
        plan = self._fitting_plan(len(handles), width)
        self._copied(self.pool.unshare, plan, handles, lens, sink, self.group)

    def _fitting_plan(self, rows: int, width: int) -> Plan:
        """The plan for copies, or a larger one."""
        plan = self._plan
        if plan is None or plan.limits.max_rows < rows or plan.limits.table_width < width:
            width = min(2 * width, self.pool.options.max_blocks_per_seq)
            self._plan = plan = Plan(self.pool, 2 * rows, 2**31 - 1, formats=(), table_width=width)
        return plan

    def _copied(self, take: Callable[..., None], plan: Plan, *arguments: Any) -> None:
        """Let a call of the pool take blocks, and copy what it says."""
        try:
            take(plan, *arguments)
            copies = plan.groups[self.group].copies
            if len(copies):
                self.backend.copy_blocks(copies)
            if plan.is_pending:
                self.pool.done(plan)
        except BaseException:
            if plan.is_pending:
                self.pool.rollback(plan)
            raise


def _full_group(pool: Pool, number: Any) -> Group:
    """Return the layer group that tokens are to leave."""
    groups = pool.options.groups
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"[Evictor] group must be an int, not {type(number).__name__} ({number!r})")
    kinds = [group.kind for group in groups]
    if "full" not in kinds:
        raise ValueError(
            f"[Evictor] the pool has no full group ({', '.join(kinds)}), tokens leave full attention only; windows and "
            "states let go by themselves"
        )
    if not 0 <= number < len(groups):
        raise ValueError(f"[Evictor] group is out of range ({number}), it must be in 0 .. {len(groups) - 1}")
    if kinds[number] != "full":
        raise ValueError(
            f"[Evictor] group {number} is a {kinds[number]}, which lets go by itself: tokens leave full groups, "
            f"{kinds.index('full')} is one"
        )
    return groups[number]
