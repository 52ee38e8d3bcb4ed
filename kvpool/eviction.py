"""Which tokens of a sequence stay when there is no room for all. docs/eviction.md is the page.

A policy is a few numbers that say how many tokens a sequence may keep, and which ones stay. `Evictor` applies it to the
sequences of a pool: it takes scores in and lets tokens leave between two steps. What one step has seen is applied
when the next one begins, so nothing waits for it, and a step that is taken back leaves no trace.

Sources: H2O is "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al.,
2023), sinks are from "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., 2023), whole blocks from
"PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large Language Model Inference" (2025).

>>> from kvpool.eviction import H2O, advise
>>> budget = advise(4096)
>>> H2O(max_kv=budget.max_kv, heavy=budget.heavy).recent
508
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvpool._core import Plan, Pool
from kvpool.groups import Group
from kvpool.protocol import SCORES, Capabilities
from kvpool.spec import checked_int


class Budget(NamedTuple):
    """The answer of `advise`."""

    max_kv: int  #: tokens that a sequence keeps at most
    heavy: int  #: of these, by their scores


def advise(context: int) -> Budget:
    """A budget for contexts of so many tokens: a quarter of them, and of that one half by scores.

    Raises
    ------
    TypeError, ValueError
        `context` is not an int, or below 16.
    """
    context = checked_int("advise", "context", context, 16)
    return Budget(context // 4, context // 8)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """The first `sink` tokens and the newest ones: StreamingLLM.

    No evictor runs: `kvpool.adapters.mlx_lm` puts full layers into ``Group.window(max_kv - sink, keep=sink)``, whose
    blocks the pool lets go. What a token reads depends on its position alone.

    Parameters
    ----------
    max_kv : int
        Tokens that a token reads, itself included.
    sink : int, default 4
        How many of them are the first ones of the sequence: fewer than the newest.

    Raises
    ------
    TypeError, ValueError
        A number is not an int or too small; `max_kv` has no room for the sinks.

    Examples
    --------
    >>> SlidingWindow(max_kv=64).window
    60
    """

    max_kv: int
    sink: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_kv", checked_int("SlidingWindow", "max_kv", self.max_kv, 8))
        object.__setattr__(self, "sink", checked_int("SlidingWindow", "sink", self.sink, 0))
        if self.window <= self.sink:
            raise ValueError(
                f"[SlidingWindow] max_kv is {self.max_kv}, too small for sink {self.sink}: the least is twice that and "
                "one more"
            )

    @property
    def window(self) -> int:
        """Newest tokens that a token reads, itself included."""
        return self.max_kv - self.sink


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The base of the policies that choose by scores.

    Parameters
    ----------
    max_kv : int
        Tokens that a sequence holds at most while it generates. A prompt that comes in chunks passes it by one chunk.
    sink : int, default 4
        Leading tokens that always stay.
    slack : int, optional
        How far below `max_kv` an eviction goes, so that the next one is that many tokens away. By default 16, and an
        eighth of a `max_kv` below 128.
    kind : {"mass", "raw"}, default "mass"
        Scores: the mean over the query heads of a KV head of what comes out of the softmax, as in the paper, or of what
        goes into it, taken absolute. Raw scores cost less to export, and choose no better than a window where
        ``docs/numbers.md`` has looked.
    alpha : float, default 0.95
        Of the moving average of scores, ``average = alpha * average + (1 - alpha) * score``; a token begins with its
        first score.
    queries : int, default 32
        Newest queries of a chunk of a prompt that are looked at, each like a step of its own.
    """

    max_kv: int
    sink: int = 4
    slack: int | None = None
    kind: str = "mass"
    alpha: float = 0.95
    queries: int = 32

    whole_blocks: ClassVar[bool] = False  #: whether blocks leave as they are, and no token moves

    def __post_init__(self) -> None:
        call = type(self).__name__
        object.__setattr__(self, "max_kv", checked_int(call, "max_kv", self.max_kv, 1))
        object.__setattr__(self, "sink", checked_int(call, "sink", self.sink, 0))
        slack = max(1, min(16, self.max_kv // 8)) if self.slack is None else checked_int(call, "slack", self.slack, 1)
        object.__setattr__(self, "slack", slack)
        if self.kind not in SCORES:
            raise ValueError(f"[{call}] kind is {self.kind!r}, it must be one of {', '.join(SCORES)}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float | np.floating):
            kind = type(self.alpha).__name__
            raise TypeError(f"[{call}] alpha must be a float, not {kind} ({self.alpha!r})")
        if not 0 < self.alpha < 1:
            raise ValueError(f"[{call}] alpha is {self.alpha}, it must be in (0, 1)")
        object.__setattr__(self, "queries", checked_int(call, "queries", self.queries, 1))

    @property
    def recent(self) -> int:
        """Newest tokens that always stay."""
        raise NotImplementedError

    def candidates(self, lens: Any, block_size: int) -> tuple[int, Any]:
        """First table index that may leave, and the end of them: full blocks without a protected token."""
        return -(-self.sink // block_size), (lens - self.recent) // block_size

    def lens_after(self, lens: np.ndarray, block_size: int) -> np.ndarray:
        """Tokens that sequences of `lens` tokens have after eviction; one that has less than `max_kv` keeps all."""
        assert self.slack is not None
        return np.where(lens >= self.max_kv, self.max_kv - self.slack, lens)

    @property
    def most(self) -> int:
        """Tokens that a sequence holds at most when a forward pass begins; those of the pass come on top."""
        return self.max_kv - 1

    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError where `max_kv` cannot be kept in blocks of so many tokens."""

    def _require_room(self) -> None:
        assert self.slack is not None
        call = type(self).__name__
        if self.sink + self.recent + self.slack > self.max_kv:
            raise ValueError(
                f"[{call}] max_kv is {self.max_kv}, smaller than sink {self.sink} + recent {self.recent} + slack "
                f"{self.slack}"
            )


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Sinks, heavy hitters and the newest tokens, chosen anew for each layer and KV head.

    Parameters
    ----------
    max_kv, sink, slack, kind, alpha, queries
        As in `Policy`.
    heavy : int, optional
        Tokens that stay for their scores; half of `max_kv` by default. The rest of `max_kv`, without the sinks, is for
        the newest ones. An eviction leaves `slack` fewer heavy hitters, for the tokens to come.

    Raises
    ------
    TypeError, ValueError
        A number of the wrong type or out of range; a budget smaller than what has to stay.

    Examples
    --------
    >>> policy = H2O(max_kv=128)
    >>> policy.sink, policy.heavy, policy.recent
    (4, 64, 60)
    """

    heavy: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        heavy = self.max_kv // 2 if self.heavy is None else checked_int("H2O", "heavy", self.heavy, 1)
        object.__setattr__(self, "heavy", heavy)
        if self.recent < 1:
            raise ValueError(
                f"[H2O] max_kv is {self.max_kv}, too small for sink {self.sink} + heavy {heavy} and a recent token"
            )
        self._require_room()

    @property
    def recent(self) -> int:
        assert self.heavy is not None
        return self.max_kv - self.sink - self.heavy


@dataclass(frozen=True, kw_only=True)
class BlockEviction(Policy):
    """Whole blocks leave, those with the lowest mean score first; no token moves, and shared blocks stay shared.

    Parameters
    ----------
    max_kv, sink, kind, alpha, queries
        As in `Policy`; the scores of all layers and heads count together. The block of a protected token stays as a
        whole, so `max_kv` has a least value for each size of blocks, see `check_block_size`.
    recent_tokens : int, optional
        Newest tokens that always stay; a quarter of `max_kv` by default.

    Raises
    ------
    TypeError, ValueError
        As in `H2O`.

    Notes
    -----
    A sequence with `max_kv` tokens loses as many blocks as bring it below; `slack` is not used.
    """

    recent_tokens: int | None = None

    whole_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.slack is None:
            object.__setattr__(self, "slack", 1)
        super().__post_init__()
        recent = self.max_kv // 4 if self.recent_tokens is None else self.recent_tokens
        object.__setattr__(self, "recent_tokens", checked_int("BlockEviction", "recent_tokens", recent, 1))
        self._require_room()

    @property
    def recent(self) -> int:
        assert self.recent_tokens is not None
        return self.recent_tokens

    def lens_after(self, lens: np.ndarray, block_size: int) -> np.ndarray:
        """As in `Policy`; what leaves are whole blocks, as many as there are to choose from at most."""
        first, end = self.candidates(lens, block_size)
        blocks = np.clip((lens - self.max_kv) // block_size + 1, 0, np.maximum(end - first, 0))
        return np.asarray(lens - blocks * block_size)

    def check_block_size(self, block_size: int) -> None:
        """As in `Policy`: blocks of protected tokens stay, and the newest of these may begin at the end of a block."""
        least = -(-self.sink // block_size) * block_size + self.recent + block_size
        if self.max_kv < least:
            raise ValueError(
                f"[BlockEviction] max_kv is {self.max_kv}, in blocks of {block_size} the least is {least}: those of "
                f"sink {self.sink}, recent {self.recent} and one more block"
            )


def check_backend(policy: Policy, can: Capabilities, block_size: int) -> None:
    """Raise ValueError where a backend cannot serve a policy: export its scores, move tokens, have such blocks."""
    call = type(policy).__name__
    if policy.kind not in can.scores:
        only = f"only {list(can.scores)}" if can.scores else "none at all"
        raise ValueError(f"[{call}] backend {can.name!r} exports no scores {policy.kind!r}, {only}")
    if not policy.whole_blocks and not can.compacts:
        raise ValueError(f"[{call}] backend {can.name!r} cannot move tokens; BlockEviction moves none")
    policy.check_block_size(block_size)


# ---------------------------------------------------------------------- a policy at work


@dataclass
class Observed:
    """Queries of a step that are looked at, where a row has several: each is a row of its own. All are int ``[R]``."""

    queries: np.ndarray  #: which of the step's tokens; those of a row stand together, oldest first
    rows: np.ndarray  #: of the step, whose table they read
    lens: np.ndarray  #: tokens that each of them sees


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
        The one that tokens leave: a full one. The backend holds each of its columns.

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
        #: For which queries `observe` is due. None: the newest of each row, as `KVBackend.attend` has it.
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
            Tokens of each in the step. With them chunks are looked at through their newest ``policy.queries``.
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

    def evict(self, handles: Sequence[int], rows: np.ndarray, after: np.ndarray) -> None:
        """Let tokens of sequences without a pending step leave; `settle` comes first.

        `rows` int ``[S]`` are theirs in `memory`, `after` int ``[S]`` their ``kv_len`` in the group from then on: less.

        Raises
        ------
        OutOfBlocks
            No blocks for copies of shared ones. Nothing has changed.
        PlanStateError, CapacityExceeded
            A row of a pending plan; one that has lost so much that its positions end. No token has left.
        Exception
            What the choice or the backend raises. ``pool.kv_len`` says whether the numbers have changed. If not, no
            token was copied or moved. If they have, what these sequences hold must not be read any more.
        """
        lens = [self.pool.kv_len(handle, self.group) for handle in handles]
        num_tokens = [self.pool.num_tokens(handle) for handle in handles]
        numbers = [rows.tolist(), lens, after.tolist(), num_tokens]
        # Nothing leaves: it raises for a pending row, before a block is copied.
        self.pool.compact(handles, lens, group=self.group)
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
        rows, width = len(handles), max(-(-self.pool.capacity(handle) // self.pool.block_size) for handle in handles)
        plan = self._plan
        if plan is None or plan.limits.max_rows < rows or plan.limits.table_width < width:
            width = min(2 * width, self.pool.options.max_blocks_per_seq)
            self._plan = plan = Plan(self.pool, 2 * rows, 2**31 - 1, formats=(), table_width=width)
        try:
            self.pool.unshare(plan, handles, lens, sink, self.group)
            if len(copies := plan.groups[self.group].copies):
                self.backend.copy_blocks(copies)
            if plan.is_pending:
                self.pool.done(plan)
        except BaseException:
            if plan.is_pending:
                self.pool.rollback(plan)
            raise


def _full_group(pool: Pool, number: Any) -> Group:
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


# ---------------------------------------------------------------------- memory


class Memory:
    """Scores and positions of the tokens of B sequences, per layer and KV head; rows are sequences.

    Parameters
    ----------
    policy : Policy
    num_layers, num_kv_heads, block_size : int
        Of the cache.
    num_rows : int, default 0
        Sequences; new ones have no tokens.
    """

    def __init__(self, policy: Policy, num_layers: int, num_kv_heads: int, block_size: int, num_rows: int = 0) -> None:
        self.policy = policy
        self.block_size = block_size
        #: ``[L, B, Hk, C']``: moving average per token, by its place in the table; C' is room
        self.scores = np.zeros((num_layers, num_rows, num_kv_heads, 0), np.float32)
        self.known = np.zeros(num_rows, np.int64)  #: places whose score is known
        self._positions: list[np.ndarray | None] = [None] * num_rows  # [L, Hk, n] as of the last eviction

    # ------------------------------------------------------------------------------------------- rows

    def append(self, other: Memory, rows: Sequence[int]) -> None:
        """Add copies of rows of another memory of an equal policy."""
        rows = list(rows)
        if not rows:
            return
        self.reserve(other.scores.shape[3])
        room = self.scores.shape[3] - other.scores.shape[3]
        more = np.pad(other.scores[:, rows], ((0, 0), (0, 0), (0, 0), (0, room)))
        self.scores = np.concatenate([self.scores, more], axis=1)
        self.known = np.concatenate([self.known, other.known[rows]])
        self._positions += [other._positions[row] for row in rows]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order."""
        rows = list(rows)
        self.scores = self.scores[:, rows]
        self.known = self.known[rows]
        self._positions = [self._positions[row] for row in rows]

    def start(self, row: int) -> None:
        """A new sequence without tokens is in this row; there are more rows if it takes more."""
        now = len(self._positions)
        if row >= now:
            more = max(row + 1, 2 * now) - now
            self.scores = np.pad(self.scores, ((0, 0), (0, more), (0, 0), (0, 0)))
            self.known = np.pad(self.known, (0, more))
            self._positions += [None] * more  # last: it says how many rows there are
        self.known[row] = 0
        self._positions[row] = None

    def saved(self, row: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A copy of what is known of a row: for `put`."""
        return self.scores[:, row, :, : self.known[row]].copy(), self._positions[row]

    def put(self, row: int, saved: tuple[np.ndarray, np.ndarray | None]) -> None:
        """Put what `saved` has copied into this row, which was started. It has room."""
        scores, self._positions[row] = saved
        self.known[row] = length = scores.shape[-1]
        self.scores[:, row, :, :length] = scores

    def truncate(self, lens: np.ndarray) -> None:
        """Rows lost what lies behind `lens` places."""
        self.known = np.minimum(self.known, lens)

    def reserve(self, room: int) -> None:
        """Make room for so many tokens in each row."""
        now = self.scores.shape[3]
        if room > now:
            self.scores = np.pad(self.scores, ((0, 0), (0, 0), (0, 0), (0, max(room - now, now // 2))))

    # ------------------------------------------------------------------------------------------- scores

    def observe(self, scores: np.ndarray, lens: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Take what one step has seen. O(L * S * Hk * C), a few passes over the array; `scores` is overwritten.

        Parameters
        ----------
        scores : float32 ``[L, S, Hk, C]``
            As `KVBackend.attend` exports them, for each layer.
        lens : ``[S]``
            Tokens of each row after the step.
        rows : int ``[S]``, optional
            Which rows these are, by default 0, 1, 2, ...; -1: none, it had no query or has ended. A row that is there
            several times is seen so often, in this order.
        """
        alpha = np.float32(self.policy.alpha)
        length = scores.shape[3]
        self.reserve(length)
        np.abs(scores, out=scores)
        mine, lens = self.scores[..., :length], np.asarray(lens, np.int64)
        places = np.arange(len(lens)) if rows is None else np.asarray(rows)
        known = self.known
        if len(places) == len(known) and (places == np.arange(len(places))).all() and (known == known[:1]).all():
            self._blend(mine, scores, alpha, int(known[0]) if len(known) else 0)
            self.known = lens.copy()
            return
        for at, row in enumerate(places.tolist()):
            if row >= 0:
                self._blend(mine[:, row], scores[:, at], alpha, int(known[row]))
                known[row] = lens[at]

    def _blend(self, mine: np.ndarray, new: np.ndarray, alpha: np.float32, known: int) -> None:
        """A token that is known moves by 1 - alpha, a new one begins where it is."""
        old, fresh = mine[..., :known], new[..., :known]
        old *= alpha
        fresh *= 1 - alpha
        old += fresh
        mine[..., known:] = new[..., known:]

    # ------------------------------------------------------------------------------------------- the choice

    def select(self, row: int, kv_len: int, target: int) -> np.ndarray:
        """Which places of a row stay: int64 ``[L, Hk, target]``, ascending; O(places), nothing is sorted.

        For a policy of whole blocks: table indices that leave, int64 ``[n]``, ascending.
        """
        policy = self.policy
        if policy.whole_blocks:
            return self._blocks(row, kv_len, target)
        num_layers, _, heads, _ = self.scores.shape
        recent = min(policy.recent, target - policy.sink)
        middle = slice(policy.sink, kv_len - recent)
        keep = np.ones((num_layers, heads, kv_len), bool)
        keep[..., middle] = False
        if chosen := target - policy.sink - recent:
            candidates = self._row_scores(row, kv_len)[..., middle]
            best = np.argpartition(candidates, candidates.shape[-1] - chosen, axis=-1)[..., -chosen:]
            np.put_along_axis(keep[..., middle], best, True, -1)
        return np.flatnonzero(keep).reshape(num_layers, heads, target) % kv_len

    def _row_scores(self, row: int, kv_len: int) -> np.ndarray:
        """Scores of a row, 0 where none is known (nothing has looked there since)."""
        known = min(int(self.known[row]), kv_len)
        found = np.zeros((self.scores.shape[0], self.scores.shape[2], kv_len), np.float32)
        found[..., :known] = self.scores[:, row, :, :known]
        return found

    def _blocks(self, row: int, kv_len: int, target: int) -> np.ndarray:
        first, end = self.policy.candidates(kv_len, self.block_size)
        count = (kv_len - target) // self.block_size
        scores = self._row_scores(row, kv_len).sum(axis=(0, 1), dtype=np.float64)
        blocks = scores[first * self.block_size : end * self.block_size].reshape(-1, self.block_size).sum(axis=1)
        return first + np.sort(np.argpartition(blocks, count - 1)[:count])

    def evicted(self, row: int, kv_len: int, chosen: np.ndarray, num_tokens: int) -> None:
        """The row was compacted to `chosen`, or lost these blocks; `num_tokens` is its logical length."""
        if self.policy.whole_blocks:
            stays = np.ones(kv_len, bool)
            stays.reshape(-1)[(chosen[:, None] * self.block_size + np.arange(self.block_size)).ravel()] = False
            places = np.flatnonzero(stays)
            chosen = np.broadcast_to(places, (self.scores.shape[0], self.scores.shape[2], len(places)))
        positions = self.positions(row, kv_len, num_tokens)
        scores, length = self._row_scores(row, kv_len), chosen.shape[2]
        self.reserve(length)
        self.scores[:, row, :, :length] = np.take_along_axis(scores, chosen, -1)
        self.known[row] = length
        self._positions[row] = np.take_along_axis(positions, chosen, -1)

    def positions(self, row: int, kv_len: int, num_tokens: int) -> np.ndarray:
        """Logical position of what is at each place: int32 ``[L, Hk, kv_len]``, for a row of `num_tokens` tokens."""
        found = np.empty((self.scores.shape[0], self.scores.shape[2], kv_len), np.int32)
        found[...] = np.arange(num_tokens - kv_len, num_tokens)
        if (old := self._positions[row]) is not None:
            n = min(kv_len, old.shape[2])
            found[..., :n] = old[..., :n]
        return found
