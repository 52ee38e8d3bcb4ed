"""`KVBlockManager`: a pool and its KV storage behind one object, with the methods of the MLX paged-attention plan.

A sequence's id is its pool handle, so a stale id is an error, not another sequence. One decode step::

    slots = manager.step(ids)                            # one new token per sequence, copy-on-write included
    tables, lens = manager.batch_tables(ids)
    for layer in range(num_layers):
        manager.write(layer, k, v, slots)                # k, v [B, n_kv_heads, head_dim], RoPE applied
        out = manager.paged_attention(q, tables, lens, layer)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool import Plan, Pool
from kvpool.config import KVSpec, blocks_for, checked_int
from kvpool.group_storage import GroupStorage
from kvpool.protocol import KVBackend, StepArrays


class BlockTableView(NamedTuple):
    """Blocks of a sequence at one moment; a copy."""

    seq_id: int
    block_ids: np.ndarray  # int32, all blocks of the sequence in order, reserved ones included
    ctx_len: int  # tokens that the sequence holds


class TailView(NamedTuple):
    """Room for the next tokens of a sequence."""

    seq_id: int
    start_pos: int  # position of the first of these tokens
    slots: np.ndarray  # int32, slot of each of them: block_id * block_size + offset


class KVBlockManager:
    """Blocks, sequences and KV storage of layers that all keep every token in one shape: one table.

    Parameters
    ----------
    spec : KVSpec
        What is stored.
    num_blocks : int, optional
        Blocks in the pool, the reserved one included.
    memory : int, str, optional
        Instead of `num_blocks`: bytes, ``"16GiB"``, or ``"auto"``, as in `blocks_for`.
    backend : str or factory, optional
        A name for `kvpool_backends.load_backend`, or ``factory(spec, num_blocks)``. By default "cpu", or "numpy"
        without native kernels.
    max_seqs, max_blocks_per_seq, watermark
        As in `Pool`.
    max_batch, max_tokens : int
        Most sequences, and most new tokens, of one call.
    log : callable, optional
        With `memory`, called with the calculation of the size. None: no message.

    Raises
    ------
    ValueError
        Not exactly one of `num_blocks` and `memory`, or memory for no block.
    TypeError
        `spec` is not one KVSpec.

    Notes
    -----
    The backend executes calls in the order in which they are made. So every step counts as executed once its copies
    were handed over. Unlike `Pool`, a manager is not thread-safe.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int | None = None,
        *,
        memory: int | str | None = None,
        backend: str | Callable[[KVSpec, int], KVBackend] | None = None,
        max_seqs: int = 1024,
        max_blocks_per_seq: int | None = None,
        watermark: int = 0,
        max_batch: int = 256,
        max_tokens: int = 4096,
        log: Callable[[str], Any] | None = print,
    ) -> None:
        if not isinstance(spec, KVSpec):
            raise TypeError(
                f"[KVBlockManager] spec must be a KVSpec, not {type(spec).__name__}: a manager has one table; for "
                "layer groups make a Pool(groups=...) and a GroupStorage"
            )
        if callable(backend):
            factory: Any = backend
        else:
            from kvpool_backends import load_backend  # imported here, because kvpool itself needs no backend

            factory = load_backend(backend)
        if num_blocks is None and memory is not None:
            machine = factory.device_info() if hasattr(factory, "device_info") else None
            size = blocks_for(memory, spec, device_info=machine)
            num_blocks = size.num_blocks
            if log is not None:
                log(size.how)
        elif num_blocks is None or memory is not None:
            raise ValueError("[KVBlockManager] give either num_blocks or memory")
        self.spec = spec
        self.pool = Pool(
            num_blocks, spec.block_size, max_seqs=max_seqs, max_blocks_per_seq=max_blocks_per_seq, watermark=watermark
        )
        self.storage = GroupStorage(factory, self.pool, [spec])
        self.backend: KVBackend = self.storage.backends[0]  # it holds all layers
        self._plan = Plan(self.pool, max_batch, max_tokens)

    def __repr__(self) -> str:
        return f"<kvpool.adapters.block_manager.KVBlockManager: {self.pool!r} on {self.backend!r}>"

    def new_sequence(self, prompt_len: int = 0) -> BlockTableView:
        """A new sequence of length 0, with the blocks of `prompt_len` tokens set aside for it."""
        return self._view(self.pool.open(prompt_len))

    def resize(self, num_blocks: int) -> None:
        """Have another number of blocks; sequences keep their tokens. Block ids change, as `table` and slots say.

        Raises
        ------
        OutOfBlocks, PlanStateError, ValueError, CapacityExceeded
            As from `Pool.resize`. State unchanged.
        MemoryError, RuntimeError
            No memory for more blocks. State unchanged.
        """
        self.storage.resize({0: num_blocks})

    def fork(self, parent_seq_id: int) -> BlockTableView:
        """A child that shares every token of the parent; nothing is copied until one of the two writes."""
        return self._view(int(self.pool.fork(parent_seq_id)[0]))

    def free(self, seq_id: int) -> None:
        """End a sequence; blocks that no other sequence shares are free again."""
        self.pool.close(seq_id)

    def table(self, seq_id: int) -> tuple[np.ndarray, int]:
        """(block_ids int32, ctx_len) of a sequence; a copy."""
        view = self._view(seq_id)
        return view.block_ids, view.ctx_len

    def batch_tables(self, seq_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """block_tables int32 ``[B, W]`` and context_lens int32 ``[B]``, as attention wants them; copies."""
        plan = self._run(seq_ids, 0)
        context_lens = plan.seq_lens.copy()
        width = -(-int(context_lens.max(initial=0)) // self.spec.block_size)
        return plan.block_tables[:, :width].copy(), context_lens

    # ---------------------------------------------------------------------- tokens

    def step(self, seq_ids: Sequence[int], num_new: int | Sequence[int] = 1) -> np.ndarray:
        """Grow sequences by new tokens and make their blocks writable.

        Returns
        -------
        int32 ``[T]``
            Slot of each new token, sequence after sequence; a copy.

        Raises
        ------
        OutOfBlocks
            Nothing was changed.
        """
        return self._run(seq_ids, num_new).slot_mapping.copy()

    def ensure_tail_capacity(self, seq_id: int, n_tokens: int = 1) -> TailView:
        """Take the blocks of the next `n_tokens` tokens and resolve copy-on-write. The length does not change.

        After this, a `step` of up to that many tokens cannot run out of blocks, until the sequence is forked.
        """
        self._run([seq_id], n_tokens, reserve=True)
        block_ids, ctx_len = self.table(seq_id)
        return TailView(seq_id, ctx_len, self._slots(block_ids, ctx_len, n_tokens))

    def write(self, layer_idx: int, k: Any, v: Any, slots: np.ndarray) -> None:
        """Store K ``[T, Hk, D]`` and V ``[T, Hk, Dv]``, RoPE applied, in the slots that `step` returned."""
        self.backend.write(self.backend.prepare(StepArrays(slot_mapping=slots)), layer_idx, k, v)

    def write_prefill(self, seq_id: int, layer_idx: int, k_chunk: Any, v_chunk: Any, start_pos: int) -> None:
        """Store K and V, RoPE applied, of tokens that `step` has planned.

        Parameters
        ----------
        k_chunk, v_chunk : ``[n, Hk, D]``, ``[n, Hk, Dv]``
            Arrays of the backend's framework.
        start_pos : int
            Position of the first token.

        Raises
        ------
        ValueError
            Not all of these positions were planned, or one of them is in a shared block. Nothing was written.
        """
        start_pos = checked_int("write_prefill", "start_pos", start_pos, least=0)
        num_tokens = int(k_chunk.shape[0])
        block_ids, ctx_len = self.table(seq_id)
        if start_pos + num_tokens > ctx_len:
            raise ValueError(
                f"[write_prefill] {num_tokens} tokens from position {start_pos} of sequence {seq_id}: "
                f"{ctx_len} are planned, call step first"
            )
        slots = self._slots(block_ids, start_pos, num_tokens)
        for block in np.unique(slots // self.spec.block_size).tolist():
            if self.pool.blocks.refcount(block) > 1:
                raise ValueError(f"[write_prefill] block {block} of sequence {seq_id} is shared, its tokens are final")
        self.write(layer_idx, k_chunk, v_chunk, slots)

    def prefill_into_kv(
        self,
        seq_id: int,
        tokens: Sequence[int],
        forward: Callable[[Sequence[int], int], tuple[Sequence[Any], Sequence[Any]]],
        max_chunk_tokens: int = 2048,
    ) -> Iterator[int]:
        """Prefill in chunks. This is a generator, so the scheduler can run decode steps between two chunks.

        Parameters
        ----------
        tokens
            The prompt, or what is left of it.
        forward : callable
            ``forward(chunk, start_pos) -> (k_layers, v_layers)``, the model's K ``[n, Hk, D]`` and V of every layer. It
            may attend to everything that was written.

        Yields
        ------
        int
            Tokens written so far.

        Raises
        ------
        OutOfBlocks
            The next chunk does not fit; the earlier ones stay.
        ValueError
            `forward` did not return K and V of every layer. As when it raises, the sequence is as long as before that
            chunk, and has no blocks for the rest of the prompt.
        """
        max_chunk_tokens = checked_int("prefill_into_kv", "max_chunk_tokens", max_chunk_tokens)
        for begin in range(0, len(tokens), max_chunk_tokens):
            chunk = tokens[begin : begin + max_chunk_tokens]
            start_pos = self.pool.num_tokens(seq_id)
            self.step([seq_id], len(chunk))
            try:
                k_layers, v_layers = forward(chunk, start_pos)
                if not len(k_layers) == len(v_layers) == self.spec.num_layers:
                    given = f"K of {len(k_layers)} and V of {len(v_layers)} layers"
                    raise ValueError(f"[prefill_into_kv] forward gave {given}, the spec has {self.spec.num_layers}")
                for layer, (k, v) in enumerate(zip(k_layers, v_layers, strict=True)):
                    self.write_prefill(seq_id, layer, k, v, start_pos)
            except BaseException:
                self.pool.truncate(seq_id, start_pos)
                raise
            yield begin + len(chunk)

    # ---------------------------------------------------------------------- attention

    def paged_attention(
        self,
        q: Any,
        block_tables: np.ndarray,
        context_lens: np.ndarray,
        layer_idx: int,
        kv_head_mapping: Any = None,
        rope_freqs: Any = None,
        scale: float | None = None,
        causal: bool = True,
        attn_mask: Any = None,
        return_attn: bool = False,
    ) -> Any:
        """Attention of the newest tokens of every sequence over its paged context.

        Parameters
        ----------
        q : ``[B, n_heads, n, head_dim]``
            The n newest tokens of each sequence, n = 1 at decode.
        block_tables, context_lens
            From `batch_tables`.
        layer_idx : int
        kv_head_mapping : ``[n_heads]``, optional
            Only contiguous groups, the default: head h reads KV head ``h // (n_heads // n_kv_heads)``.
        rope_freqs, attn_mask : None
            Must be None. The model rotates q and k before it calls, and the mask is causal.
        scale : float, optional
            ``1 / sqrt(head_dim)`` by default.
        causal : bool
            False for one token alone, whose mask is the same.
        return_attn : bool
            Also return the weights ``[B, n_heads, n, C]``, for debugging, with a backend that has them ("numpy").

        Returns
        -------
        ``[B, n_heads, n, v_head_dim]``
        """
        if len(q.shape) != 4 or not len(q) == len(block_tables) == len(context_lens):
            raise ValueError(
                f"[paged_attention] q must have shape [B, n_heads, n, head_dim] with B = {len(context_lens)}, "
                f"the number of rows in the tables ({len(block_tables)}), got {list(q.shape)}"
            )
        batch, num_heads, num_new, head_dim = q.shape
        if rope_freqs is not None:
            raise ValueError(
                "[paged_attention] rope_freqs must be None: positions are the model's, "
                "which rotates k before it is written and q before it comes here"
            )
        if attn_mask is not None or (not causal and num_new > 1):
            raise ValueError("[paged_attention] only the causal mask is known: attn_mask None, causal True")
        groups = np.arange(num_heads) // max(1, num_heads // self.spec.num_kv_heads)
        if kv_head_mapping is not None and not np.array_equal(np.asarray(kv_head_mapping), groups):
            raise ValueError(
                f"[paged_attention] kv_head_mapping must be contiguous groups, {groups.tolist()}, "
                f"got {np.asarray(kv_head_mapping).tolist()}"
            )
        plan = StepArrays(
            block_tables=np.asarray(block_tables),
            seq_lens=np.asarray(context_lens),
            cu_q_lens=np.arange(batch + 1, dtype=np.int32) * num_new,
            slot_mapping=np.full(batch * num_new, -1, np.int32),
        )
        rows = q.swapaxes(1, 2).reshape(batch * num_new, num_heads, head_dim)
        result: Any = self.backend.attend(self.backend.prepare(plan), layer_idx, rows, scale, return_attn=return_attn)
        arrays = result if return_attn else (result,)
        shaped = tuple(x.reshape(batch, num_new, num_heads, x.shape[-1]).swapaxes(1, 2) for x in arrays)
        return shaped if return_attn else shaped[0]

    @property
    def k(self) -> np.ndarray:
        """Keys, float32 ``[layers, kv_heads, blocks, block_size, head_dim]``: a copy, for debugging."""
        return self._plane(0)

    @property
    def v(self) -> np.ndarray:
        """Values, float32 ``[layers, kv_heads, blocks, block_size, v_head_dim]``: a copy, for debugging."""
        return self._plane(1)

    # ---------------------------------------------------------------------- internals

    def _run(self, seq_ids: Sequence[int], num_new: int | Sequence[int], reserve: bool = False) -> Plan:
        """One step of the pool with its copies executed; all or nothing."""
        plan = self._plan
        (self.pool.reserve if reserve else self.pool.step)(plan, seq_ids, num_new)
        try:
            if len(plan.copies):
                self.storage.copy_blocks(plan)
        except BaseException:
            self.pool.rollback(plan)
            raise
        self.pool.done(plan)
        return plan

    def _view(self, seq_id: int) -> BlockTableView:
        return BlockTableView(seq_id, self.pool.table(seq_id), self.pool.num_tokens(seq_id))

    def _slots(self, block_ids: np.ndarray, start_pos: int, num_tokens: int) -> np.ndarray:
        position = np.arange(start_pos, start_pos + num_tokens)
        size = self.spec.block_size
        return (block_ids[position // size].astype(np.int64) * size + position % size).astype(np.int32)

    def _plane(self, which: int) -> np.ndarray:
        spec, blocks = self.spec, np.arange(self.backend.num_blocks)
        layers = [self.backend.to_numpy(self.backend.gather(layer, blocks)[which]) for layer in range(spec.num_layers)]
        planes = np.stack(layers).reshape(spec.num_layers, blocks.size, spec.block_size, spec.num_kv_heads, -1)
        return np.ascontiguousarray(planes.transpose(0, 3, 1, 2, 4))
