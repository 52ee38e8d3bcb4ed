"""What a backend is: the data plane that owns the KV tensors, as a `typing.Protocol`.

The core (`kvpool.Pool`, `kvpool.Plan`) hands out integers; a backend turns them into writes, copies and
attention. A backend never allocates a block, the core never touches a byte of KV. Nothing has to be
inherited: any object with these methods is a backend, and `kvpool.testing.conformance` tells whether it is a
correct one.

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
One step of an engine is: `copy_blocks(plan)` once, then for every layer `write` and then `attend`. A backend
executes copies, writes and reads of one layer in that order whatever it queues inside. It hands out no view
of its storage: every array that it returns is a copy, because a view would pin the storage (an array
framework copies the whole pool on the next write).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvpool.config import KVSpec

Array = Any  # an array of the backend's framework, or a numpy array


class PlanArrays(Protocol):
    """What a backend reads of a plan. `kvpool.Plan` has it, so has `ArrayPlan`; a test can fake it.

    Read-only, because the plan owns its arrays. A backend reads only what belongs to the formats that it
    asked for.
    """

    @property
    def block_tables(self) -> np.ndarray:
        """``[B, W]``, block ids in logical order; entries past the context are padding."""
        ...

    @property
    def seq_lens(self) -> np.ndarray:
        """``[B]``, context length after the step in tokens; 0 for a padding row."""
        ...

    @property
    def cu_q_lens(self) -> np.ndarray:
        """``[B + 1]``, row i owns query tokens ``cu_q_lens[i] : cu_q_lens[i + 1]``."""
        ...

    @property
    def slot_mapping(self) -> np.ndarray:
        """``[T]``, ``block_id * S + offset`` of each new token; negative: do not write."""
        ...

    @property
    def copies(self) -> np.ndarray:
        """``[K, 3]``, rows of (src_block, dst_block, num_tokens)."""
        ...


def _no_copies() -> np.ndarray:
    return np.zeros((0, 3), np.int32)


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """A plan of plain arrays, for tests and for engines that keep their own tables. Nothing is checked."""

    block_tables: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    seq_lens: np.ndarray = field(default_factory=_nothing)
    cu_q_lens: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    slot_mapping: np.ndarray = field(default_factory=_nothing)
    copies: np.ndarray = field(default_factory=_no_copies)


class BatchShape(NamedTuple):
    """One shape that `warmup` prepares for."""

    num_rows: int  # B
    num_tokens: int  # T
    table_width: int  # W
    num_q_heads: int  # Hq


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend accepts. ``None`` in a field means: any."""

    name: str
    layouts: tuple[str, ...]  # names of kvpool.config.LAYOUTS
    dtypes: tuple[str, ...]  # names of kvpool.config.DTYPES
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    max_q_heads_per_kv_head: int | None = None
    mixed_head_dims: bool = True  # v_head_dim may differ from head_dim
    reads_see_writes: bool = True  # attend(layer, plan) sees what write(layer, plan) stored; else the next plan
    return_attn: bool = True  # attend(..., return_attn=True) works

    def refusal(self, spec: KVSpec, num_q_heads: int | None = None) -> str | None:
        """Why this backend cannot serve `spec` (and, if given, that many query heads); None when it can."""
        per_kv_head = None if num_q_heads is None else -(-num_q_heads // spec.num_kv_heads)
        for what, value, accepted in (
            ("layout", spec.layout, self.layouts),
            ("dtype", spec.dtype, self.dtypes),
            ("block_size", spec.block_size, self.block_sizes),
            ("head_dim", spec.head_dim, self.head_dims),
            ("v_head_dim", spec.value_head_dim, self.head_dims),
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
    """Owner of the KV storage of one pool: planes k and v of every layer, allocated once, never grown.

    A backend is made by a factory ``factory(spec, num_blocks) -> KVBackend`` (a class will do). A factory may
    have a static method ``device_info() -> dict``: the machine for `memory="auto"`, in the form of
    ``mlx.core.device_info()`` plus ``active_nbytes``, what is in use (see `kvpool.config.blocks_for`).

    Wrong shapes and values raise `ValueError`, wrong types `TypeError`, ids outside the pool `IndexError`,
    each as ``[call] what is wrong (value), the limit`` and before a byte is changed. What depends on queued
    device work may surface later; the engine then rolls the plan back and steps again, and must get the same
    result.
    """

    spec: KVSpec
    num_blocks: int
    required_formats: tuple[str, ...]  # plan formats that this backend reads, for Plan(formats=...)

    def capabilities(self) -> Capabilities:
        """What this backend accepts. Constant."""
        ...

    def asarray(self, x: np.ndarray) -> Array:
        """A float32 numpy array as this backend's own kind of array, ready for `write` and `attend`."""
        ...

    def to_numpy(self, x: Array) -> np.ndarray:
        """A result of this backend as a numpy array: a copy, float32 (or float64 where it is)."""
        ...

    def copy_blocks(self, plan: PlanArrays | np.ndarray) -> None:
        """Copy the first ``num_tokens`` positions of block src to block dst, in all layers and planes.

        Parameters
        ----------
        plan : a plan, or int32 ``[K, 3]``
            Rows (src_block, dst_block, num_tokens), 1 <= num_tokens <= S. No dst is a src of the same call,
            so the rows may be executed in any order. The rest of dst keeps what it held.
        """
        ...

    def write(self, layer: int, k: Array, v: Array, plan: PlanArrays) -> None:
        """Store the new tokens of a step in one layer, RoPE already applied.

        Parameters
        ----------
        k, v : ``[T, Hk, D]`` and ``[T, Hk, Dv]``
            Any float dtype; stored in the dtype of the spec, rounded to nearest even.
        plan
            Token t goes to slot ``plan.slot_mapping[t]``; a negative slot is skipped. T includes padding
            tokens.
        """
        ...

    def attend(
        self, layer: int, q: Array, plan: PlanArrays, scale: float | None = None, *, return_attn: bool = False
    ) -> Array | tuple[Array, Array]:
        """Causal attention of the query tokens over the paged context: decode and ragged chunks alike.

        Parameters
        ----------
        q : ``[T, Hq, D]``
            Query tokens, row after row as in ``plan.cu_q_lens``. Query head h reads KV head ``h // (Hq //
            Hk)``.
        plan
            Query j of row i, with ``q_len`` queries, sees the ``seq_lens[i] - q_len + j + 1`` oldest tokens
            of the row.
        scale : float, optional
            Multiplies the scores, ``1 / sqrt(D)`` by default.
        return_attn : bool
            Also return the weights, for debugging.

        Returns
        -------
        out : ``[T, Hq, Dv]``
            Tokens from ``cu_q_lens[B]`` on are padding: their rows are 0.
        attn : ``[T, Hq, C]``, only with `return_attn`
            Softmax weights in logical token order, 0 where nothing is visible. C is the longest ``seq_lens``.

        Notes
        -----
        Reads only slots that a query sees. Any other slot may hold NaN, padding entries of the table may name
        any block or be -1, and neither may change the result.
        """
        ...

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[Array, Array]:
        """Copies of k ``[n, Hk, D]`` and v ``[n, Hk, Dv]`` of whole blocks, in the order given.

        n is `num_tokens`, the number of leading positions that are wanted: by default all of them.
        """
        ...

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Set every byte of these blocks to 0, in all layers and planes."""
        ...

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of whole blocks, uint8 ``[n, spec.block_nbytes]``.

        The order inside a row does not depend on layout or backend: layer, plane (k, v), position, head,
        element, little-endian. So what one backend exports, any other one with the same spec imports.
        """
        ...

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        """Overwrite whole blocks with rows of `export_blocks`. Blocks must be distinct."""
        ...

    def warmup(self, shapes: Iterable[BatchShape]) -> None:
        """Compile what these batch shapes need, so that the first step pays nothing. Changes no block."""
        ...
