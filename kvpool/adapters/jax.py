"""Ragged paged attention in JAX: Levanter's wire format, written by a kvpool pool; docs/embedding.md is the page.

The KV of a layer is one array ``[pages, page_size, 2 * kv_heads, head_dim]`` with K and V heads interleaved
(k0, v0, k1, v1, ...), which is what JAX's own ``ragged_paged_attention`` reads. JAX arrays are values, so `update` and
`copy_pages` return the next one; donate the old one to the jitted step and XLA writes in place. The arrays of a plan
are copied when they go to the device, because on a CPU JAX would otherwise share them with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from kvpool import Group, Plan, Pool
from kvpool.adapters import importing, warn_if_untested

RELEASES = ("0.10", "0.11")  # the oldest that the tests run on kvpool, and the first that they do not
with importing("jax", jax.__version__, ">= {}, < {}".format(*RELEASES)):
    import jax.numpy as jnp
    from jax.tree_util import register_dataclass
FORMATS = ("block_tables", "slot_ids", "seq_lens", "cu_q_lens", "slot_mapping", "positions")
PADDINGS = (-1, 0, 2_000_000)  # "no page" in Levanter's releases; any value that is not a page or slot works


@register_dataclass
@dataclass(frozen=True)
class PageBatchInfo:
    """The arrays of one step for the device, int32, static shapes: S = max_seqs, W = pages_per_seq, T = max_tokens."""

    slot_ids: jax.Array  #: ``[S]``, slot of each sequence in the pool, padded
    page_indices: jax.Array  #: ``[S, W]``, pages of each sequence in order, padded
    seq_lens: jax.Array  #: ``[S]``, length after this step, 0 for padding
    cu_q_lens: jax.Array  #: ``[S + 1]``, prefix sums of the new tokens per sequence, flat at the end
    num_seqs: jax.Array  #: ``[1]``, sequences that are not padding
    new_token_dests: jax.Array  #: ``[T]``, ``page * page_size + slot`` of each, padded with a value that no page has
    positions: jax.Array  #: ``[T]``, position of each new token, 0 for padding
    copies: jax.Array  #: ``[S, 3]``, (source page, target page, tokens) to copy before any write; (0, 0, 0): nothing
    page_size: int = field(metadata={"static": True})


class PageTable:
    """Levanter's allocator calls on a pool. Page 0 is reserved; padded writes may go there.

    Parameters
    ----------
    num_pages, page_size : int
        Of the KV arrays.
    max_seqs, pages_per_seq, max_tokens : int
        S, W and T of `PageBatchInfo`. T is per call of `allocate`, which takes a smaller one for decode steps.
    pad : int, default -1
        Means "no page" and "no slot", see `PADDINGS`: not 1 .. num_pages * page_size - 1. A page that a window has let
        go is page 0.
    groups : sequence of Group, optional
        Of layers that differ, each with one column, KV arrays and tables of its own, full or with a window. `num_pages`
        counts the pages of arena 0; a group in another arena says ``num_blocks=``. `allocate` says with ``group=``
        whose arrays it returns, `info` has those of the others.

    Raises
    ------
    ValueError, TypeError
        From `Pool` and `Plan`; or `pad` is a page or slot that a sequence could own.
    """

    def __init__(self, num_pages: int, page_size: int, max_seqs: int, pages_per_seq: int, max_tokens: int, *,
                 pad: int = -1, groups: Sequence[Group] | None = None) -> None:  # fmt: skip
        warn_if_untested("PageTable", "jax", jax.__version__, *RELEASES)
        self.pool = Pool(num_pages, page_size, max_seqs=max_seqs, max_blocks_per_seq=pages_per_seq, groups=groups)
        _check_groups(owned := self.pool.options.groups)
        slots = max(self.pool.stats(own.arena).num_blocks * (own.block_size or page_size) for own in owned)
        if 0 < pad < slots:
            raise ValueError(f"[PageTable] pad is {pad}, a page or a slot: they are below {slots}")
        pads = dict.fromkeys(("block_tables", "slot_ids", "slot_mapping"), pad)
        self.plan = Plan(self.pool, max_seqs, max_tokens, formats=FORMATS, pad=pads)
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        self._copies, self._num_seqs = np.zeros((max_seqs, 3), np.int32), np.zeros(1, np.int32)

    def open(self, num_tokens: int = 0) -> int:
        """A new sequence with pages for `num_tokens` tokens. Raises `OutOfBlocks`, state unchanged."""
        return int(self.pool.open(num_tokens))

    def clone(self, seq: int, n: int = 1) -> NDArray[np.int64]:
        """`n` sequences that share every page of `seq`. A sequence that writes a shared last page gets a copy of it."""
        return self.pool.fork(seq, n)

    def allocate(
        self, seqs: Sequence[int], num_new: Any = 1, *, max_tokens: int | None = None, group: int | None = None
    ) -> PageBatchInfo:
        """Make room for new tokens of a batch. Returns the arrays for the device.

        Parameters
        ----------
        seqs : int64 ``[n]``, n <= max_seqs
        num_new : int or ints ``[n]``, new tokens of each
        max_tokens : int, optional
            T of the result, the table's by default: one static shape for prefill, a smaller one for decode.
        group : int, optional
            The layer group that the arrays are of. A table with several groups needs it.

        Raises
        ------
        ValueError
            No such group, or none is named though there are several. State unchanged.
        OutOfBlocks, CapacityExceeded, StaleHandle
            See `Pool.step`. State unchanged; else the step is pending until `done` or `undo`. O(n + changed pages).
        """
        self._part("allocate", group)
        total = self.max_tokens if max_tokens is None else max_tokens
        self.pool.step(self.plan, seqs, num_new, pad_to=(self.max_seqs, total))
        return self.info(group)

    def info(self, group: int | None = None) -> PageBatchInfo:
        """The arrays of the newest step for one layer group, as `allocate` returns them."""
        plan, number = self.plan, self._part("info", group)
        part = plan.groups[number]
        self._copies[: len(part.copies)] = part.copies
        self._copies[len(part.copies) :] = 0
        self._num_seqs[0] = len(plan.handles)
        return PageBatchInfo(
            slot_ids=jnp.array(plan.slot_ids),
            page_indices=jnp.array(part.block_tables[..., 0]),
            seq_lens=jnp.array(part.kv_lens),
            cu_q_lens=jnp.array(plan.cu_q_lens),
            num_seqs=jnp.array(self._num_seqs),
            new_token_dests=jnp.array(part.slot_mapping[0]),
            positions=jnp.array(plan.positions),
            copies=jnp.array(self._copies),
            page_size=self.pool.options.groups[number].block_size or self.pool.block_size,
        )

    def _part(self, call: str, group: int | None) -> int:
        groups = self.pool.options.groups
        text = ", ".join(f"group={i} ({g.kind}{f' {g.size}' if g.size else ''})" for i, g in enumerate(groups))
        if group is None and len(groups) > 1:
            raise ValueError(f"[{call}] the pool has {len(groups)} layer groups, say of which the arrays are: {text}")
        if group is not None and not 0 <= index(group) < len(groups):
            raise ValueError(f"[{call}] no such layer group ({index(group)}), there are {text}")
        return 0 if group is None else index(group)

    def done(self) -> None:
        """The step was dispatched: JAX runs steps in order, so the next one may be planned."""
        self.pool.done(self.plan)

    def undo(self) -> None:
        """The step was not run: lengths and pages are as before it."""
        self.pool.rollback(self.plan)

    def free_finished(self, seqs: Sequence[int], finished: Any) -> int:
        """Give back the pages of the sequences whose bool ``[n]`` entry is true; returns how many there were."""
        ended = [seq for seq, ends in zip(seqs, np.asarray(finished, np.bool_).tolist(), strict=True) if ends]
        self.pool.close(ended)
        return len(ended)

    def reset(self) -> None:
        """Forget every sequence. Logical: no KV is zeroed, stale pages are beyond every ``seq_lens``."""
        self.pool.reset()


def copy_pages(kv_pages: jax.Array, info: PageBatchInfo) -> jax.Array:
    """The copies of a step, before its writes: the first ``copies[:, 2]`` tokens of pages that were shared."""
    source, target, tokens = info.copies.T
    keep = jnp.arange(info.page_size)[None, :] < tokens[:, None]
    moved = jnp.where(keep[..., None, None], kv_pages[source], kv_pages[target])
    return kv_pages.at[jnp.where(tokens > 0, target, len(kv_pages))].set(moved, mode="drop")


def update(kv_pages: jax.Array, info: PageBatchInfo, k: jax.Array, v: jax.Array) -> jax.Array:
    """Write new K and V, ``[T, kv_heads, head_dim]``, RoPE applied; padding goes nowhere."""
    rows = jnp.stack([k, v], axis=2).reshape(len(k), -1, k.shape[-1]).astype(kv_pages.dtype)  # k0 v0 k1 v1 ...
    num_slots = len(kv_pages) * info.page_size
    dests = jnp.where((info.new_token_dests >= 0) & (info.new_token_dests < num_slots), info.new_token_dests, num_slots)
    return kv_pages.at[dests // info.page_size, dests % info.page_size].set(rows, mode="drop")


def _check_groups(groups: Sequence[Group]) -> None:
    for number, group in enumerate(groups):
        if group.kind == "state" or group.columns != 1:
            found = f"groups[{number}] is {group.kind} with {group.columns} columns"
            raise ValueError(f"[PageTable] {found}, a layer has an array of its own here: columns=1, no states")


def attend(
    q: jax.Array, kv_pages: jax.Array, info: PageBatchInfo, scale: float, window: int | None = None
) -> jax.Array:
    """Causal attention of ``q [T, heads, head_dim]`` over the pages, jittable, in plain JAX; padding gives zeros.

    A query reads the last `window` tokens, itself included; None: all.

    The meaning of JAX's ``ref_ragged_paged_attention``, which loops over sequences in Python and so cannot be jitted.
    On a TPU use ``ragged_paged_attention`` with the same arrays. O(T * W * page_size).
    """
    (num_tokens, num_heads, head_dim), token = q.shape, jnp.arange(len(q))
    row = jnp.clip(jnp.searchsorted(info.cu_q_lens, token, side="right") - 1, 0, len(info.seq_lens) - 1)
    valid = token < info.cu_q_lens[-1]
    pages = jnp.clip(info.page_indices, 0, len(kv_pages) - 1)[row]
    kv = kv_pages[pages].reshape(num_tokens, -1, kv_pages.shape[2] // 2, 2, head_dim)
    k, v = kv[..., 0, :], kv[..., 1, :]
    grouped = q.reshape(num_tokens, k.shape[2], -1, head_dim)
    score = jnp.einsum("thgd,tkhd->thgk", grouped, k, preferred_element_type=jnp.float32) * scale
    last = info.seq_lens[row] - info.cu_q_lens[row + 1] + token  # position of the token itself
    key = jnp.arange(k.shape[1])[None, :]
    seen = (key <= last[:, None]) & valid[:, None]
    if window is not None:
        seen &= key > last[:, None] - window
    weight = jax.nn.softmax(jnp.where(seen[:, None, None, :], score, -jnp.inf), axis=-1)
    weight = jnp.where(seen[:, None, None, :], weight, 0.0)
    v = jnp.where(seen[:, :, None, None], v, 0)  # stale pages may hold anything, NaN included
    out = jnp.einsum("thgk,tkhd->thgd", weight, v.astype(jnp.float32))
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
