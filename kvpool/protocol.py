"""The backend protocol: a backend owns the KV tensors.

The core (`kvpool.Pool`, `kvpool.Plan`) hands out integers. A backend turns them into writes, copies and attention.
A backend never allocates a block, and the core never touches a byte of KV. Any object with these methods is a
backend; it inherits nothing. `kvpool.testing.conformance` checks whether it is correct.

Dimension letters, used in every docstring of kvpool
-----------------------------------------------------
    L  layers                       S   block_size, tokens per block
    B  rows of a batch              Hk  KV heads
    T  query tokens of a batch      Hq  query heads, Hq = G * Hk
    N  blocks in the pool           D   head_dim of keys and queries
    K  copies of a step             Dv  head_dim of values (D unless the spec says otherwise)
    W  width of a block table       C   longest context of a batch, in tokens

Order
-----
One step of an engine calls ``step = prepare(plan)`` and ``copy_blocks(plan)`` once, then for every layer `write` and
then `attend`. A backend executes copies, writes and reads of one layer in the order of the calls, even if it queues
them. Every array that it returns is a copy. A view would pin the storage: an array framework would copy the whole
pool on the next write.

Steps
-----
A step is the backend's own object: what `prepare` checked, or brought to a device. It may refer to the arrays of its
plan, so it is valid until that plan is stepped again (``step``, ``reserve``, ``unshare``). After ``done`` it may still
be read until its blocks are given to another sequence. After ``rollback`` it must not be used. Several may be in use at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvpool._core import Plan
from kvpool.spec import KVSpec, checked_int

Array = Any  # an array of the backend's framework, or a numpy array
Step = Any  # what `KVBackend.prepare` makes of a plan


_NO_COPIES = np.zeros((0, 3), np.int32)


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, repr=False)
class StepArrays:
    """The arrays of a plan that a backend reads: for tests, and for engines that keep their own tables.

    `kvpool.Plan` has the same attributes, for the formats that it was made with. Nothing is checked here.
    """

    #: int ``[B, W]``: block ids in logical order; entries past the context are padding
    block_tables: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    #: int ``[B]``: context length after the step in tokens; 0 for a padding row
    seq_lens: np.ndarray = field(default_factory=_nothing)
    #: int ``[B + 1]``: row i owns query tokens ``cu_q_lens[i] : cu_q_lens[i + 1]``
    cu_q_lens: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    #: int ``[T]``: ``block_id * S + offset`` of each new token; negative: do not write
    slot_mapping: np.ndarray = field(default_factory=_nothing)
    #: int ``[K, 3]``: rows of (src_block, dst_block, num_tokens)
    copies: np.ndarray = field(default_factory=lambda: _NO_COPIES)

    @staticmethod
    def of_shape(shape: BatchShape, block_size: int) -> StepArrays:
        """A step of this shape that reads block 0 and writes nothing, as `KVBackend.warmup` needs."""
        num_rows, num_tokens, width, _ = shape
        ends = np.minimum(np.arange(num_rows + 1) * -(-num_tokens // max(num_rows, 1)), num_tokens)
        tables = np.zeros((num_rows, width), np.int32)
        return StepArrays(tables, np.full(num_rows, width * block_size), ends, np.full(num_tokens, -1))

    @staticmethod
    def of_queries(plan: AnyPlan, tokens: np.ndarray) -> StepArrays:
        """A step that only reads: the query tokens `tokens` ``[R]`` of a plan, each in its own row, which it ends."""
        ends = np.asarray(plan.cu_q_lens)[1:]
        rows = np.searchsorted(ends, tokens, side="right")
        seen = np.asarray(plan.seq_lens)[rows] - (ends[rows] - 1 - tokens)
        return StepArrays(np.asarray(plan.block_tables)[rows], seen, np.arange(len(rows) + 1))

    @staticmethod
    def rows_of(plan: AnyPlan, rows: np.ndarray) -> StepArrays:
        """Some rows of a plan, in the order of `rows` ``[R]``, without its copies."""
        cu_q_lens = np.asarray(plan.cu_q_lens, np.int64)
        counts = cu_q_lens[rows + 1] - cu_q_lens[rows]
        ends = np.cumsum(counts)
        tokens = np.arange(counts.sum()) + np.repeat(cu_q_lens[rows] - ends + counts, counts)
        return StepArrays(
            np.asarray(plan.block_tables)[rows],
            np.asarray(plan.seq_lens)[rows],
            np.concatenate([[0], ends]),
            np.asarray(plan.slot_mapping)[tokens],
        )

    @staticmethod
    def of_group(plan: Plan, group: int, column: int = 0) -> StepArrays:
        """One column of a layer group of a plan with the format ``cu_q_lens``, the hole cut out.

        The table has the blocks that a window keeps of the beginning of the sequence, and then those from the row's
        position ``kv_starts`` on; ``seq_lens`` counts their tokens. Attention is relative, so causality and windows
        without kept tokens are as before. The copies of the group are not in it: ``plan.groups[group].copies`` has
        those of all its columns.
        """
        arrays, own = plan.groups[group], plan.pool.options.groups[group]
        block_size = own.block_size or plan.pool.block_size
        tables, starts, lens = arrays.block_tables[:, :, column], arrays.kv_starts, arrays.kv_lens
        latest = int(starts.max(initial=0))
        if latest:
            kept = np.minimum(-(-own.keep // block_size) * block_size, starts)
            lens = lens - starts + kept
        width = -(-int(lens.max(initial=0)) // block_size)
        if latest == 0 or (len(starts) == 1 and not own.keep):
            tables = tables[:, latest // block_size :][:, :width]
        else:
            entries = np.arange(width)
            behind = entries + (starts - kept)[:, None] // block_size
            entries = np.where(entries < kept[:, None] // block_size, entries, behind)
            tables = np.take_along_axis(tables, np.minimum(entries, tables.shape[1] - 1), axis=1)
        return StepArrays(tables, lens, plan.cu_q_lens, arrays.slot_mapping[column], _NO_COPIES)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self.seq_lens)} rows and {len(self.slot_mapping)} tokens, "
            f"{len(self.copies)} copies>"
        )


AnyPlan = Plan | StepArrays


class BatchShape(NamedTuple):
    """One shape that `warmup` prepares for."""

    num_rows: int  # B
    num_tokens: int  # T
    table_width: int  # W
    num_q_heads: int  # Hq


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Options beyond plain attention. Each field that is not None is one feature.

    Query head h of the token t at position p of its row scores the key at position c, c <= p, as ::

        s_c = scale * (q . k_c)
        s_c = soft_cap * tanh(s_c / soft_cap)
        s_c = s_c + alibi_slopes[h] * (c - p)
        s_c = s_c + mask[t, h, c]
        out = sum_c exp(s_c) v_c / (exp(sinks[h]) + sum_c exp(s_c))        over c > p - window

    with the lines and terms of absent features left out. A query that sees no key has the result 0.

    Parameters
    ----------
    window : int, optional
        Sliding window: a query sees the `window` newest tokens up to itself; 1 is itself alone.
    soft_cap : float, optional
        Bounds scores to ``-soft_cap .. soft_cap`` (Gemma 2); finite, > 0.
    sinks : array ``[Hq]``, optional
        Per head the score of one more key whose value is 0 (gpt-oss, "Efficient Streaming Language Models with
        Attention Sinks"). Scale, cap, slope, mask and window do not apply to it.
    alibi_slopes : array ``[Hq]``, optional
        Per head a bias linear in the distance ("Train Short, Test Long"). c - p <= 0, so slopes are usually > 0.
    mask : array ``[T, C']`` or ``[T, 1, C']`` or ``[T, Hq, C']``, optional
        T as in the queries, C' at least the longest context of the batch; column c is position c of the token's own
        row. Floats are added, -inf or finite, up to the largest; in a bool mask False hides the key. Entries that
        causality or the window hides have no effect.

    Raises
    ------
    TypeError, ValueError
        As ``[AttentionOptions] what (value), the limit``. What depends on the batch is checked by `attend`.

    Notes
    -----
    Arguments are converted: `sinks` and `alibi_slopes` to read-only float32 copies, `mask` to a numpy array of bool or
    float32. A mask that is one already is not copied, so do not change it until `attend` has returned. Anything that
    `numpy.asarray` takes is accepted. Two options are equal only if they are the same object.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    mask: Array | None = None
    features: tuple[str, ...] = field(init=False, repr=False, default=())  # names of the others that are not None

    def __post_init__(self) -> None:
        for name, checked in _CHECKS.items():
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, checked(name, given))
        object.__setattr__(self, "features", tuple(name for name in FEATURES if getattr(self, name) is not None))

    def check(self, num_tokens: int, num_q_heads: int, longest: int) -> None:
        """Raise ValueError, ``[attend] ...``, unless the arrays fit T, Hq and the longest context of a batch. O(1)."""
        for name in ("sinks", "alibi_slopes"):
            per_head = getattr(self, name)
            if per_head is not None and per_head.size != num_q_heads:
                raise ValueError(f"[attend] {name} has {per_head.size} heads, q has {num_q_heads}")
        if self.mask is None:
            return
        shape = self.mask.shape
        if shape[0] != num_tokens or (len(shape) == 3 and shape[1] not in (1, num_q_heads)) or shape[-1] < longest:
            heads = "" if len(shape) == 2 else f"1 or {num_q_heads}, "
            raise ValueError(
                f"[attend] mask has shape {list(shape)}, it must be [{num_tokens}, {heads}C'] with C' >= {longest}"
            )


FEATURES: tuple[str, ...] = tuple(option.name for option in fields(AttentionOptions) if option.init)
SCORES: tuple[str, ...] = ("raw", "mass")  # kinds of scores that `KVBackend.attend` can export


def _soft_cap(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float, np.integer, np.floating)):
        raise TypeError(f"[AttentionOptions] {name} must be a float, got {type(given).__name__}")
    with np.errstate(over="ignore"):
        in_kernels = np.float32(given)
    if not (np.isfinite(in_kernels) and in_kernels > 0):
        raise ValueError(f"[AttentionOptions] {name} is {given}, it must be finite and > 0 in float32")
    return float(given)


def _per_head(name: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"[AttentionOptions] {name} must be an array of floats, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"[AttentionOptions] {name} must have shape [Hq], got {list(array.shape)}")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused as that
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"[AttentionOptions] {name} must be finite in float32, got {given}")
    array.flags.writeable = False
    return array


def _mask(name: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if array.dtype != np.bool_ and not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"[AttentionOptions] {name} must be an array of floats or bools, got {array.dtype}")
    if array.ndim not in (2, 3):
        raise ValueError(
            f"[AttentionOptions] {name} must have shape [T, C'] or [T, 1 or Hq, C'], got {list(array.shape)}"
        )
    with np.errstate(over="ignore"):  # a float64 below float32 is -inf
        return array if array.dtype == np.bool_ else array.astype(np.float32, copy=False)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "window": partial(checked_int, "AttentionOptions"),
    "soft_cap": _soft_cap,
    "sinks": _per_head,
    "alibi_slopes": _per_head,
    "mask": _mask,
}


def checked_ids(call: str, what: str, given: Any, limit: int, where: str, least: int = 0) -> np.ndarray:
    """`given` as int64 ``[n]`` within ``least .. limit - 1``; messages say `what` it is, and `where`."""
    ids = np.asarray(given)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"[{call}] {what} ids must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"[{call}] {what}s must have shape [n], got {list(ids.shape)}")
    if ids.size and not least <= ids.min() <= ids.max() < limit:
        bad = int(ids.min()) if ids.min() < least else int(ids.max())
        raise IndexError(f"[{call}] {what} {bad} is outside the {where}, the limit is {limit}")
    return ids.astype(np.int64)


def check_distinct(call: str, what: str, ids: np.ndarray) -> None:
    """Raise if one of the ids comes twice."""
    if np.unique(ids).size != ids.size:
        raise ValueError(f"[{call}] a {what} is named twice in {ids.tolist()}")


def checked_bytes(call: str, data: Any, num_rows: int, nbytes: int) -> np.ndarray:
    """`data` as uint8 ``[num_rows, nbytes]``, row after row."""
    data = np.asarray(data, order="C")
    if data.dtype != np.uint8:
        raise TypeError(f"[{call}] data must be uint8, got {data.dtype}")
    if data.shape != (num_rows, nbytes):
        raise ValueError(f"[{call}] data must have shape {[num_rows, nbytes]}, got {list(data.shape)}")
    return data


def checked_resize(have: int, num_blocks: Any, moves: Any) -> tuple[int, np.ndarray]:
    """The arguments of a `resize` of `have` blocks, or state slots: the new number, and moves as int64 ``[K, 2]``."""
    size, pairs = checked_int("resize", "num_blocks", num_blocks), np.asarray(moves)
    if pairs.size == 0:
        pairs = np.zeros((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"[resize] moves must have shape [K, 2], got {list(pairs.shape)}")
    sources = checked_ids("resize", "source", pairs[:, 0], have, "blocks that leave", min(size, have))
    targets = checked_ids("resize", "target", pairs[:, 1], size, "blocks that stay")
    check_distinct("resize", "source", sources)
    check_distinct("resize", "target", targets)
    return size, np.stack([sources, targets], axis=1)


def move_rows(old: np.ndarray, new: np.ndarray, moves: np.ndarray) -> None:
    """Fill ``new [n, ...]`` with the rows of `old` that have a place there, or with those that `moves` brings there.

    Moves are those of `checked_resize`: there are some only where rows become fewer. Each row is copied once, by memcpy
    if it is one piece of memory, without a temporary array of rows.
    """
    count = min(len(old), len(new))
    axes = 0, *sorted(range(1, new.ndim), key=lambda axis: -new.strides[axis])
    old, new = old.transpose(axes), new.transpose(axes)
    if len(moves) and old.flags.c_contiguous and new.flags.c_contiguous:
        index = np.arange(count)
        index[moves[:, 1]] = moves[:, 0]
        np.take(old, index, axis=0, out=new, mode="clip")  # another mode would fill a buffer first
        return
    new[:count] = old[:count]
    for source, target in moves.tolist():
        new[target] = old[source]


def move_within(rows: Any, moves: np.ndarray) -> None:
    """Move rows inside an array, where there is no memory for another one. All come from behind the rows that stay."""
    for source, target in moves.tolist():
        rows[target] = rows[source]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The limits of a backend. ``None`` in a field means: no limit."""

    name: str
    layouts: tuple[str, ...]  # names of kvpool.spec.LAYOUTS
    dtypes: tuple[str, ...]  # names of kvpool.spec.DTYPES
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    max_q_heads_per_kv_head: int | None = None
    mixed_head_dims: bool = True  # v_head_dim may differ from head_dim
    reads_see_writes: bool = True  # attend(step, ...) sees what write(step, ...) stored; else the next step does
    return_attn: bool = True  # attend(..., return_attn=True) works
    features: tuple[str, ...] = ()  # names of the fields of AttentionOptions that attend takes
    scores: tuple[str, ...] = ()  # kinds of scores that attend exports, of SCORES
    scores_out: bool = False  # attend(..., scores_out=array) fills an array of the caller's
    compacts: bool = False  # compact(blocks, keep) works
    quant_bits: tuple[int, ...] = ()  # values of spec.k_bits and spec.v_bits, in addition to None
    quant_group_sizes: tuple[int, ...] = ()
    batch_invariant: bool = False  # a row's result has the same bits alone and in any batch, wherever its blocks are
    arrays: str = "numpy"  # the framework whose arrays write and attend take and return: "numpy" or "mlx"
    lazy: bool = False  # calls are queued, and run when the framework evaluates; else they have run when they return
    latent: bool = False  # attend takes specs with latent=True
    paged: bool = True  # attend reads the blocks in place; else it gathers contexts first, as read does

    def lacks(self, options: AttentionOptions | None) -> tuple[str, ...]:
        """Features of `options` that this backend does not have; empty if it has them all."""
        return () if options is None else tuple(name for name in options.features if name not in self.features)

    def refusal(self, spec: KVSpec, num_q_heads: int | None = None) -> str | None:
        """The reason why this backend cannot serve `spec` (and, if given, that many query heads); None when it can."""
        per_kv_head = None if num_q_heads is None else -(-num_q_heads // spec.num_kv_heads)
        for what, value, accepted in (
            ("layout", spec.layout, (None, *self.layouts)),
            ("dtype", spec.dtype, self.dtypes),
            ("block_size", spec.block_size, self.block_sizes),
            ("head_dim", spec.head_dim, self.head_dims),
            ("v_head_dim", spec.value_head_dim, self.head_dims),
            ("k_bits", spec.k_bits, (None, *self.quant_bits)),
            ("v_bits", spec.v_bits, (None, *self.quant_bits)),
            ("quant_group_size", spec.quant_group_size, self.quant_group_sizes if spec.is_quantized else None),
        ):
            if accepted is not None and value not in accepted:
                return f"{what} {value!r} is not among {accepted} of backend {self.name!r}"
        if not self.mixed_head_dims and spec.head_dim != spec.value_head_dim:
            return f"backend {self.name!r} needs equal head dims, got {spec.head_dim} and {spec.value_head_dim}"
        if per_kv_head is not None and per_kv_head > (self.max_q_heads_per_kv_head or per_kv_head):
            limit = self.max_q_heads_per_kv_head
            return f"{per_kv_head} query heads per KV head, the limit of backend {self.name!r} is {limit}"
        return None


@runtime_checkable
class KVBackend(Protocol):
    """Owner of the KV storage of one pool: planes k and v of every layer.

    A backend is made by a factory ``factory(spec, num_blocks) -> KVBackend`` (a class will do). One that serves layout
    "block" also takes ``storage=``, uint8 ``[num_blocks, spec.block_nbytes]``: memory of the caller, to be used instead
    of its own. Rows are contiguous, and may lie apart: what is between two of them belongs to others. A factory may
    have a static method ``device_info() -> dict``: the machine for `memory="auto"`, in the form of
    ``mlx.core.device_info()`` plus ``active_nbytes``, what is in use (see `kvpool.config.blocks_for`).

    Wrong shapes and values raise `ValueError`, wrong types `TypeError`, ids outside the pool `IndexError`,
    each as ``[call] what is wrong (value), the limit`` and before a byte is changed. Errors of queued device work may
    surface later. The engine then rolls the plan back and steps again, and must get the same result.
    """

    spec: KVSpec
    num_blocks: int
    required_formats: tuple[str, ...]  # plan formats that this backend reads, see Plan(backend=...)
    capabilities: Capabilities  # what this backend accepts: a constant, made once

    def asarray(self, x: np.ndarray) -> Array:
        """A float32 numpy array as this backend's own kind of array, ready for `write` and `attend`."""
        ...

    def to_numpy(self, x: Array) -> np.ndarray:
        """A result of this backend as a numpy array: a copy, float32 (or float64 where it is)."""
        ...

    def prepare(self, plan: AnyPlan) -> Step:
        """Make a step of a plan, for `write`, `attend` and `read` of all layers.

        Changes no byte of the storage. "Steps" above says how long a step is valid. A wrong plan is refused here, or by
        the first call with the step.
        """
        ...

    def copy_blocks(self, plan: AnyPlan | np.ndarray) -> None:
        """Copy the first ``num_tokens`` positions of block src to block dst, in all layers and planes.

        Parameters
        ----------
        plan : a plan, or int32 ``[K, 3]``
            Rows (src_block, dst_block, num_tokens), 1 <= num_tokens <= S. No dst is a src of the same call,
            so the rows may be executed in any order. The rest of dst does not change. Without rows nothing is done.
        """
        ...

    def write(self, step: Step, layer: int, k: Array, v: Array) -> None:
        """Store the new tokens of a step in one layer, RoPE already applied.

        Parameters
        ----------
        step
            Token t goes to slot ``slot_mapping[t]`` of its plan; a negative slot is skipped. T includes padding
            tokens.
        k, v : ``[T, Hk, D]`` and ``[T, Hk, Dv]``
            Any float dtype. Stored in the dtype of the spec, rounded to nearest even, or quantized from that. If a
            group of quantized elements has a NaN or an infinity, the whole group is stored as NaN.
        """
        ...

    def attend(
        self,
        step: Step,
        layer: int,
        q: Array,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
        return_attn: bool = False,
        scores: str | None = None,
        scores_out: np.ndarray | None = None,
    ) -> Array | tuple[Array, ...]:
        """Causal attention of the query tokens over the paged context: decode and ragged chunks alike.

        With ``spec.latent`` D is the elements of a latent and its rotary part, Dv those of the latent
        (``spec.query_dim``, ``spec.result_dim``). `ValueError` unless ``capabilities.latent``.

        Parameters
        ----------
        step
            Query j of row i of its plan, with ``q_len`` queries, sees the ``seq_lens[i] - q_len + j + 1`` oldest
            tokens of the row.
        q : ``[T, Hq, D]``
            Query tokens, row after row as in ``cu_q_lens``. Query head h reads KV head ``h // (Hq // Hk)``.
        scale : float, optional
            Multiplies the scores, ``1 / sqrt(D)`` by default.
        options : AttentionOptions, optional
            Window, soft cap, sinks, ALiBi, mask. `ValueError` for a feature that ``capabilities.features``
            does not name.
        return_attn : bool
            Also return the weights, for debugging.
        scores : "raw" or "mass", optional
            Also return how much each position matters to the newest query of its row, a kind that
            ``capabilities.scores`` names, for policies that evict. With s_hc what `AttentionOptions` adds
            up for query head h and position c, and G query heads to a KV head: "raw" is the mean of s_hc over
            those heads; "mass" is the mean of their softmax weights, a sink in the denominator.
        scores_out : float32 ``[B', Hk, C']``, optional
            Filled instead of a new array where ``capabilities.scores_out``: B' >= B, C' >= C, positions 4 bytes
            apart. Elements beyond B or C do not change.

        Returns
        -------
        out : ``[T, Hq, Dv]``
            Tokens from ``cu_q_lens[B]`` on are padding: their rows are 0.
        attn : ``[T, Hq, C]``, only with `return_attn`
            Softmax weights in logical token order, 0 where nothing is visible. C is the longest ``seq_lens``.
            With sinks a row of weights sums to less than 1: the rest is the sink's.
        s : float32 ``[B, Hk, C]``, only with `scores`, and then last
            In logical token order: column c is position c of the row's table. 0 where the newest query sees nothing
            (past ``seq_lens[i]``, behind the window, masked) and in rows without queries. A head that does not see a
            position adds nothing to its mean; the divisor is always G. `scores_out[:B, :, :C]` where that is given.

        Notes
        -----
        Reads only slots that a query sees. Any other slot may hold NaN. Padding entries of the table may name any
        block or be -1. Neither may change the result.
        """
        ...

    def read(self, step: Step, layer: int) -> tuple[Array, Array]:
        """The contexts of a step: copies of K ``[B, Hk, C, D]`` and V ``[B, Hk, C, Dv]``, C being the longest one.

        For attention that the caller computes. Past the end of a row K holds anything (mask it), and V holds 0,
        because a weight of 0 does not hide a NaN. Quantized planes are returned as floats.
        """
        ...

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[Array, Array]:
        """Copies of k ``[n, Hk, D]`` and v ``[n, Hk, Dv]`` of whole blocks, in the order given.

        n is `num_tokens`, the number of leading positions: by default all of them. Quantized planes are returned as
        floats.
        """
        ...

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Set every byte of these blocks to 0, in all layers and planes."""
        ...

    def compact(self, blocks: Sequence[int] | np.ndarray, keep: Sequence[int] | np.ndarray) -> None:
        """Move the tokens of one sequence that it keeps to the front of its blocks, in all layers and planes.

        Parameters
        ----------
        blocks : ints ``[m]``
            The table of the sequence, or its leading blocks; distinct.
        keep : ints ``[L, Hk, n]``, or ``[n]`` for all layers and heads alike
            Ascending places of tokens among these blocks. Afterwards place j of layer l and KV head h holds what
            ``keep[l, h, j]`` held. The stored bytes are moved unchanged. Places from n on hold anything.

        Notes
        -----
        Raises `ValueError` before a byte is changed if `keep` does not ascend or leaves the blocks, and always if
        ``capabilities.compacts`` is False. It takes effect in the order of calls. `kvpool.Pool.compact` decides whether
        the blocks may be rewritten (rows of a pending plan may not). A backend does not know plans.
        """
        ...

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of whole blocks, uint8 ``[n, spec.block_nbytes]``.

        The order inside a row does not depend on layout or backend: layer, plane (`KVSpec.stored_planes`), position,
        head, element, little-endian. So any backend with the same spec can import it.
        """
        ...

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        """Overwrite whole blocks with rows of `export_blocks`. Blocks must be distinct."""
        ...

    def resize(
        self, num_blocks: int, moves: Sequence[Sequence[int]] | np.ndarray, *, storage: np.ndarray | None = None
    ) -> None:
        """Have another number of blocks from now on, after all calls so far. Steps made before are not valid any more.

        One layer after the other gets new memory and gives its old memory back, so both numbers of blocks of one layer
        are there at a time; of layout "block" those of all layers. A smaller number never fails for want of memory,
        because the pool has moved its blocks already: a layer that gets none keeps its old memory, and moves its blocks
        inside it. O(bytes of the blocks that stay).

        Parameters
        ----------
        num_blocks : int
        moves : ints ``[K, 2]``
            Of `kvpool.Pool.resize`: block ``moves[k, 0]``, which leaves, becomes block ``moves[k, 1]``, which stays.
            All other blocks keep their bytes. Bytes of blocks that come are anything.
        storage : uint8 ``[num_blocks, spec.block_nbytes]``, optional
            For a backend that was made with `storage`: other memory, where its owner has moved the blocks already.

        Raises
        ------
        MemoryError, RuntimeError
            The system, or the framework, has no memory for more blocks. State unchanged.
        """
        ...

    def queued(self, layer: int) -> Sequence[Array]:
        """Arrays of the framework. Evaluating them runs all calls on a layer so far.

        Empty if ``capabilities.lazy`` is False. Evaluate them, and do not keep them.
        """
        ...

    def settle(self) -> int:
        """Wait until all calls have run. Returns how many arrays of the storage moved since the last `settle`.

        An array moves if its framework copies it in order to write to it. A backend that writes in place returns 0.
        """
        ...

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Compile what these batch shapes need, so that the first step does not have to. Changes no block.

        Without shapes: compile the calls of `attend` so far for other lengths. `scores`: a kind of scores that the
        engine will request beside plain results.
        """
        ...
