"""Random engines on a real pool, and one on any backend: compared with dense attention after every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvpool import Plan, Pool
from kvpool.config import KVSpec
from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.protocol import KVBackend, StepArrays
from kvpool.testing.filled import Factory, close, dense_rows, values, write

VOCABULARY = 211
_MAX_TOKENS = 48
_Q_HEADS = 4


class Engine:
    """Draws what an engine does to a pool, turn by turn; who inherits makes and checks the steps.

    A token is an integer; its keys and values in each layer come from a fixed table. So a sequence's history, a list of
    tokens, says what the pool must hold for it.
    """

    turns: tuple[str, ...]  #: what is done, as often as it stands there
    most_open: int
    most_rows: int

    def __init__(self, pool: Pool, formats: Sequence[str], max_tokens: int, specs: Iterable[KVSpec], seed: int) -> None:
        self.pool, self.seed, self.rng = pool, seed, np.random.default_rng(seed)
        self.plan = Plan(pool, self.most_rows, max_tokens, formats=tuple(formats))
        self.tokens = [
            [values(self.rng, (VOCABULARY, spec.num_kv_heads, dim), spec.dtype) for _, dim in spec.planes]
            for spec in specs
        ]
        self.history: dict[int, list[int]] = {}
        self.num_steps = 0

    def play(self, turns: Iterable[int]) -> None:
        """Play and check these turns, then close everything: no block may be missing.

        Each draws from numbers of its own: others can be left out, and it stays what it is.
        """
        for turn in turns:
            self.rng = np.random.default_rng([self.seed, turn])
            self._turn(list(self.history))
        self.pool.close(list(self.history))
        stats = self.pool.stats()
        assert stats.blank == stats.num_blocks - stats.reserved, f"blocks leaked: {stats} (seed {self.seed})"
        self.pool.check()
        self.pool.shutdown()

    def _turn(self, live: list[int]) -> None:
        what = self.rng.choice(self.turns)
        if not live or (what == "open" and len(live) < self.most_open):
            self.history[self.pool.open()] = []
        elif what == "step" or (what in ("open", "fork") and len(live) == self.most_open):
            handles = [int(h) for h in self.rng.permutation(live)[: self.rng.integers(1, self.most_rows + 1)]]
            if not self.step(handles, self.rng.integers(0, 9, len(handles)).tolist()):
                self.close(max(live, key=lambda handle: len(self.history[handle])))
        else:
            getattr(self, what)(live[self.rng.integers(len(live))])

    def step(self, handles: list[int], counts: list[int]) -> bool:
        """Give each row so many new tokens. Returns False if there are too few blocks."""
        raise NotImplementedError

    def fork(self, handle: int) -> int:
        """A child with the same history."""
        child = int(self.pool.fork(handle)[0])
        self.history[child] = list(self.history[handle])
        return child

    def close(self, handle: int) -> None:
        """Close a sequence."""
        self.pool.close(handle)
        del self.history[handle]


class _BackendFailed(Exception):
    """The planted failure."""


class RandomEngine(Engine):
    """An engine on one backend, every answer of which is checked.

    Before each step every slot that no sequence may read is set to NaN. With `fail_every`, every that many-th step is
    broken off in its last layer, half written. What raises `failure`, a step or a reservation, is rolled back and done
    again, once.
    """

    turns = ("step",) * 11 + ("fork",) * 3 + ("truncate", "close", "open") * 2
    most_open, most_rows = 8, 6

    def __init__(
        self,
        factory: Factory,
        spec: KVSpec,
        seed: int,
        fail_every: int = 0,
        failure: type[BaseException] = _BackendFailed,
        num_blocks: int | None = None,
    ) -> None:
        self.spec, self.fail_every, self.failure = spec, fail_every, failure
        num_blocks = num_blocks or 2 + max(6, 64 // spec.block_size)
        self.backend: KVBackend = factory(spec, num_blocks)
        pool = Pool(num_blocks, spec.block_size, max_seqs=12)
        super().__init__(pool, self.backend.required_formats, _MAX_TOKENS, [spec] * spec.num_layers, seed)

    def truncate(self, handle: int) -> None:
        """Shorten a sequence."""
        length = int(self.rng.integers(len(self.history[handle]) + 1))
        self.pool.truncate(handle, length)
        del self.history[handle][length:]

    def step(self, handles: list[int], counts: list[int]) -> bool:
        """Give each row so many new tokens. Returns False if there are too few blocks."""
        tokens = [self.rng.integers(VOCABULARY, size=n).tolist() for n in counts]
        pad_to = (self.most_rows, _MAX_TOKENS) if self.rng.random() < 0.3 else None
        try:
            if self.rng.random() < 0.2:  # a reservation's copies are work of their own
                self._reserve(handles, counts)
            self._poison()
            self.pool.step(self.plan, handles, counts, pad_to=pad_to)
        except (OutOfBlocks, CapacityExceeded):  # a sequence may outgrow the pool
            return False
        self.num_steps += 1
        fail = self.fail_every > 0 and self.num_steps % self.fail_every == 0
        try:
            self._execute(handles, tokens, fail)
        except self.failure:
            self._roll_back()
            self.pool.step(self.plan, handles, counts, pad_to=pad_to)
            self._execute(handles, tokens)
        self.pool.done(self.plan)
        for handle, new in zip(handles, tokens, strict=True):
            self.history[handle] += new
        return True

    def _reserve(self, handles: list[int], counts: list[int]) -> None:
        self.pool.reserve(self.plan, handles, counts)
        try:
            self.backend.copy_blocks(self.plan)
        except self.failure:
            self._roll_back()
            self.pool.reserve(self.plan, handles, counts)
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
            k, v = (backend.asarray(x[new]) for x in self.tokens[layer])
            if fail and layer == self.spec.num_layers - 1:
                half = plan.slot_mapping.copy()
                half[::2] = -1
                backend.write(backend.prepare(StepArrays(slot_mapping=half)), layer, k, v)
                raise self.failure
            backend.write(step, layer, k, v)
            q = values(self.rng, (new.size, _Q_HEADS, self.spec.head_dim), self.spec.dtype)
            out = backend.to_numpy(backend.attend(reads, layer, backend.asarray(q)))
            contexts = [self.history[handle] + row for handle, row in zip(handles, tokens, strict=True)]
            rows = [(len(row), *(x[of] for x in self.tokens[layer])) for row, of in zip(tokens, contexts, strict=True)]
            what = f"engine step {self.num_steps}, layer {layer}, engine seed {self.seed}"
            close(out, dense_rows(q, self.spec.value_head_dim, rows), self.spec, what)

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
