"""A backend that raises in any one of its calls: the pool has lost nothing, and the same call made again goes well."""

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.manager import KVBlockManager
from kvpool_backends.numpy import NumpyBackend

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
CALLS = ("write", "attend", "copy_blocks")


class Lost(Exception):
    """The device is gone."""


class Failing(NumpyBackend):
    """The reference, whose call number `fail_at` raises: half of them before they do anything, half after."""

    fail_at, made = 0, 0


def _fails(name):
    def call(self, *arguments, **options):
        Failing.made += 1
        if Failing.made == Failing.fail_at and Failing.fail_at % 2:
            raise Lost(name)
        result = getattr(NumpyBackend, name)(self, *arguments, **options)
        if Failing.made == Failing.fail_at:
            raise Lost(name)
        return result

    return call


for _name in CALLS:
    setattr(Failing, _name, _fails(_name))


def vectors(seed, count, heads=2):
    return np.random.default_rng(seed).standard_normal((count, heads, 8)).astype(np.float32)


class Engine:
    """A program of eleven engine steps: prompts, forks that write into shared tails, decoding, ends."""

    def __init__(self):
        self.manager = KVBlockManager(SPEC, 24, backend=Failing)
        self.rows, self.seen, self.slots = [], [], None

    def program(self):
        manager = self.manager
        for prompt in (6, 3):
            yield lambda n=prompt: self.rows.append(manager.new_sequence(n).seq_id)
            yield from self.step(lambda: self.rows[-1:], prompt)
        yield lambda: self.rows.append(manager.fork(self.rows[0]).seq_id)
        yield lambda: self.rows.append(manager.fork(self.rows[0]).seq_id)
        for number in range(5):
            yield from self.step(lambda: list(self.rows), 1, number)
        yield lambda: manager.free(self.rows.pop(0))
        yield from self.step(lambda: list(self.rows), 2)

    def step(self, rows, new, seed=7):
        """One engine step: slots, then every layer's write and attention."""

        def take():
            self.slots = self.manager.step(rows(), new)

        yield take
        for layer in range(SPEC.num_layers):
            yield lambda layer=layer: self.manager.write(
                layer, vectors(seed + layer, len(self.slots)), vectors(seed + 9, len(self.slots)), self.slots
            )
            yield lambda layer=layer: self.look(layer, rows(), seed)

    def look(self, layer, rows, seed):
        q = np.broadcast_to(vectors(seed + 20, 4)[:, :1].reshape(1, 4, 1, 8), (len(rows), 4, 1, 8)).copy()
        self.seen.append(self.manager.paged_attention(q, *self.manager.batch_tables(rows), layer).copy())

    def state(self):
        """Lengths, tables and counters. A rollback gives blocks back, not their order on the free list."""
        tables = [self.manager.table(row)[0].tolist() for row in self.rows]
        stats = self.manager.pool.stats()
        return tables, [self.manager.table(row)[1] for row in self.rows], stats[:9], len(self.seen)


def run(fail_at):
    """Run the program; a call that raises is made again. Returns (what was seen, state at the end, failures)."""
    Failing.fail_at, Failing.made = fail_at, 0
    engine, failures = Engine(), 0
    for action in engine.program():
        before = engine.state()
        try:
            action()
        except Lost:
            failures += 1
            assert engine.state() == before
            engine.manager.pool.check()
            action()
    engine.manager.pool.check()
    for row in engine.rows:
        engine.manager.free(row)
    assert engine.manager.pool.stats().used == 0
    return engine.seen, failures, Failing.made


def test_every_call_of_the_backend_fails_once():
    peace, failures, total = run(0)
    assert failures == 0 and total > 30
    for number in range(1, total + 1):
        seen, failures, _ = run(number)
        assert failures == 1, number
        assert all(np.array_equal(a, b) for a, b in zip(seen, peace, strict=True)), number


def test_error_of_the_backend_is_what_the_caller_sees():
    Failing.fail_at, Failing.made = 1, 0
    engine = Engine()
    row = engine.manager.new_sequence(4).seq_id
    slots = engine.manager.step([row], 4)
    with pytest.raises(Lost, match=r"copy_blocks|write"):
        engine.manager.write(0, vectors(1, 4), vectors(2, 4), slots)
