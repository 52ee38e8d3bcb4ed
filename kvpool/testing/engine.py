"""A random engine on a real pool and any backend, compared with dense attention after every step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpool import Plan, Pool
from kvpool.config import KVSpec
from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.protocol import KVBackend, StepArrays
from kvpool.testing.dense import dense_attention_and_size
from kvpool.testing.filled import Expected, Factory, close, values, write

_VOCABULARY = 211
_MAX_ROWS = 6
_MAX_TOKENS = 48
_Q_HEADS = 4


class _BackendFailed(Exception):
    """The planted failure."""


class RandomEngine:
    """Draws what an engine does to a pool, and checks every answer of the backend.

    A token is an integer; its keys and values in each layer come from a fixed table. So a sequence's history, a list of
    tokens, says what the pool must hold for it. Before each step every slot that no sequence may read is set to NaN. A
    step that finds too few blocks closes the longest sequence instead.

    With `fail_every`, every that many-th step is broken off in its last layer, half written. What raises `failure`, a
    step or a reservation, is rolled back and done again, once.
    """

    def __init__(
        self,
        factory: Factory,
        spec: KVSpec,
        seed: int,
        fail_every: int = 0,
        failure: type[BaseException] = _BackendFailed,
        num_blocks: int | None = None,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.fail_every = fail_every
        self.failure = failure
        num_blocks = num_blocks or 2 + max(6, 64 // spec.block_size)
        self.pool = Pool(num_blocks, spec.block_size, max_seqs=12)
        self.backend: KVBackend = factory(spec, num_blocks)
        self.plan = Plan(self.pool, _MAX_ROWS, _MAX_TOKENS, formats=tuple(self.backend.required_formats))
        rng, shape = np.random.default_rng(seed), (_VOCABULARY, spec.num_kv_heads)
        self.k = [values(rng, (*shape, spec.head_dim), spec.dtype) for _ in range(spec.num_layers)]
        self.v = [values(rng, (*shape, spec.value_head_dim), spec.dtype) for _ in range(spec.num_layers)]
        self.history: dict[int, list[int]] = {}
        self.num_steps = 0

    def play(self, turns: Iterable[int]) -> None:
        """Play and check these turns, then close everything: no block may be missing.

        Each draws from numbers of its own: others can be left out, and it stays what it is.
        """
        for turn in turns:
            self.rng = np.random.default_rng([self.seed, turn])
            self._turn()
        self.pool.close(list(self.history))
        stats = self.pool.stats()
        assert stats.blank == stats.num_blocks - stats.reserved, f"blocks leaked: {stats} (seed {self.seed})"
        self.pool.check()
        self.pool.shutdown()

    def _turn(self) -> None:
        live = list(self.history)
        what = self.rng.choice(["step", "fork", "truncate", "close", "open"], p=[0.55, 0.15, 0.1, 0.08, 0.12])
        if not live or (what == "open" and len(live) < 8):
            self.history[self.pool.open()] = []
            return
        handle = live[self.rng.integers(len(live))]
        if what == "fork" and len(live) < 8:
            child = int(self.pool.fork(handle)[0])
            self.history[child] = list(self.history[handle])
        elif what == "truncate":
            length = int(self.rng.integers(len(self.history[handle]) + 1))
            self.pool.truncate(handle, length)
            del self.history[handle][length:]
        elif what == "close":
            self.pool.close(handle)
            del self.history[handle]
        else:
            self._step(live)

    def _step(self, live: list[int]) -> None:
        num_rows = int(self.rng.integers(1, min(_MAX_ROWS, len(live)) + 1))
        handles = [int(h) for h in self.rng.permutation(live)[:num_rows]]
        num_new = self.rng.integers(0, 8, num_rows).astype(np.int32)
        tokens = [self.rng.integers(_VOCABULARY, size=n).tolist() for n in num_new]
        pad_to = (_MAX_ROWS, _MAX_TOKENS) if self.rng.random() < 0.3 else None
        try:
            if self.rng.random() < 0.2:  # a reservation's copies are work of their own
                self._reserve(handles, num_new)
            self._poison()
            self.pool.step(self.plan, handles, num_new, pad_to=pad_to)
        except (OutOfBlocks, CapacityExceeded):  # a sequence may outgrow the pool
            longest = max(self.history, key=lambda h: len(self.history[h]))
            self.pool.close(longest)
            del self.history[longest]
            return
        self.num_steps += 1
        fail = self.fail_every > 0 and self.num_steps % self.fail_every == 0
        try:
            self._execute(handles, tokens, fail)
        except self.failure:
            self._roll_back()
            self.pool.step(self.plan, handles, num_new, pad_to=pad_to)
            self._execute(handles, tokens)
        self.pool.done(self.plan)
        for handle, new in zip(handles, tokens, strict=True):
            self.history[handle] += new

    def _reserve(self, handles: list[int], num_new: np.ndarray) -> None:
        self.pool.reserve(self.plan, handles, num_new)
        try:
            self.backend.copy_blocks(self.plan)
        except self.failure:
            self._roll_back()
            self.pool.reserve(self.plan, handles, num_new)
            self.backend.copy_blocks(self.plan)
        self.pool.done(self.plan)

    def _roll_back(self) -> None:
        """Take the step back; every sequence has the length that it had."""
        self.pool.rollback(self.plan)
        self.pool.check()
        for handle, history in self.history.items():
            length = self.pool.num_tokens(handle)
            assert length == len(history), f"{length} tokens after a rollback, not {len(history)} (seed {self.seed})"

    def _execute(self, handles: list[int], tokens: list[list[int]], fail: bool = False) -> None:
        """One forward: copies, then per layer writes and reads."""
        backend, plan = self.backend, self.plan
        new = np.zeros(len(plan.slot_mapping), np.int64)
        flat = [token for row in tokens for token in row]
        new[: len(flat)] = flat
        step = reads = backend.prepare(plan)
        if not backend.capabilities.reads_see_writes:  # visible to the next plan: read by another one
            tables, lens = plan.block_tables.copy(), plan.seq_lens.copy()
            reads = backend.prepare(StepArrays(tables, lens, plan.cu_q_lens.copy(), plan.slot_mapping.copy()))

        backend.copy_blocks(plan)
        for layer in range(self.spec.num_layers):
            k, v = backend.asarray(self.k[layer][new]), backend.asarray(self.v[layer][new])
            if fail and layer == self.spec.num_layers - 1:
                half = plan.slot_mapping.copy()
                half[::2] = -1
                backend.write(backend.prepare(StepArrays(slot_mapping=half)), layer, k, v)
                raise self.failure
            backend.write(step, layer, k, v)
            q = values(self.rng, (new.size, _Q_HEADS, self.spec.head_dim), self.spec.dtype)
            out = backend.to_numpy(backend.attend(reads, layer, backend.asarray(q)))
            expected, size = np.zeros((new.size, _Q_HEADS, self.spec.value_head_dim)), np.zeros((new.size, _Q_HEADS, 1))
            begin = 0
            for handle, row in zip(handles, tokens, strict=True):
                end = begin + len(row)
                context = np.array(self.history[handle] + row, np.int64)
                if row:
                    k_row, v_row = self.k[layer][context], self.v[layer][context]
                    expected[begin:end], size[begin:end] = dense_attention_and_size(q[begin:end], k_row, v_row)
                begin = end
            close(
                out,
                Expected(expected, size),
                self.spec,
                f"engine step {self.num_steps}, layer {layer}, engine seed {self.seed}",
            )

    def _poison(self) -> None:
        """NaN into every slot that holds no token of a sequence."""
        size = self.spec.block_size
        dead = np.ones((self.pool.num_blocks, size), bool)
        for handle, history in self.history.items():
            table = self.pool.table(handle)
            for position in range(len(history)):
                dead[table[position // size], position % size] = False
        slots = np.flatnonzero(dead).astype(np.int32)
        for layer in range(self.spec.num_layers):
            shape = (slots.size, self.spec.num_kv_heads)
            k, v = (np.full((*shape, dim), np.nan, np.float32) for _, dim in self.spec.planes)
            plan = StepArrays(slot_mapping=slots)
            write(self.backend, plan, layer, k, v)
