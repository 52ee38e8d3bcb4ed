"""A backend that raises in any one of its calls: the pool has lost nothing, and the same call made again goes well.

That of mlx-lm's adapter is in `test_mlx_lm_raises`.
"""

from collections import Counter

import numpy as np
import pytest

from kvpool import Plan, Pool
from kvpool.config import KVSpec
from kvpool.eviction import H2O, BlockEviction, Evictor, Memory
from kvpool.testing.conformance_engines import RandomEngine
from kvpool_backends.numpy import NumpyBackend

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
HEAVIEST = H2O(max_kv=12, sink=4, heavy=4, slack=1)
CALLS = (
    *("asarray", "to_numpy", "write", "attend", "copy_blocks", "gather"),
    *("compact", "zero", "export_blocks", "import_blocks"),
)


class Lost(Exception):
    """The device is gone."""


class Failing(NumpyBackend):
    """The reference, whose call number `fail_at` raises: before it does anything, or when it has done it all."""

    fail_at, made, is_late, failed = 0, 0, False, Counter()

    @classmethod
    def begin(cls, fail_at, is_late=False):
        cls.fail_at, cls.made, cls.is_late = fail_at, 0, is_late


def _fails(name):
    def call(self, *arguments, **options):
        Failing.made += 1
        fails = Failing.made == Failing.fail_at
        Failing.failed[name] += fails
        if fails and not Failing.is_late:
            raise Lost(name)
        result = getattr(NumpyBackend, name)(self, *arguments, **options)
        if fails:
            raise Lost(name)
        return result

    return call


for _name in CALLS:
    setattr(Failing, _name, _fails(_name))


def vectors(seed, count, heads=2):
    return np.random.default_rng(seed).standard_normal((count, heads, 8)).astype(np.float32)


class Watched(RandomEngine):
    """A random engine that keeps what it saw in the steps that went well."""

    def __init__(self, seed):
        super().__init__(Failing, SPEC, seed, failure=Lost)
        self.seen, self.rollbacks = [], 0

    def _execute(self, handles, tokens, fail=False):
        super()._execute(handles, tokens, fail)
        lens = self.plan.seq_lens[: len(handles)].tolist()
        layers = [self.backend.gather(layer, range(self.pool.num_blocks)) for layer in range(SPEC.num_layers)]
        for row, length in enumerate(lens):
            slots = self.plan.block_tables[row].repeat(4)[:length] * 4 + np.arange(length) % 4
            self.seen.append([(k[slots], v[slots]) for k, v in layers])

    def _roll_back(self):
        super()._roll_back()
        self.rollbacks += 1

    def _poison(self):
        """No engine does this: it does not count, and does not fail."""
        made, Failing.made, Failing.fail_at, at = Failing.made, 0, 0, Failing.fail_at
        super()._poison()
        Failing.made, Failing.fail_at = made, at


def run_engine(fail_at, is_late=False, seed=5, turns=14):
    """Return (keys and values of all rows of all steps, rollbacks, calls of the backend)."""
    Failing.begin(fail_at, is_late)
    engine = Watched(seed)
    engine.play(range(turns))
    return engine.seen, engine.rollbacks, Failing.made


@pytest.mark.long
@pytest.mark.parametrize("is_late", [False, True])
def test_engine_rolls_back_whatever_call_fails_and_steps_again(is_late):
    peace, rollbacks, total = run_engine(0)
    assert rollbacks == 0 and total > 60
    Failing.failed.clear()
    for number in range(1, total + 1):
        seen, rollbacks, _ = run_engine(number, is_late)
        assert rollbacks == 1, number
        for step, (found, due) in enumerate(zip(seen, peace, strict=True)):
            for a, b in zip(found, due, strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), (number, step)
    assert {"asarray", "to_numpy", "write", "attend", "copy_blocks"} <= set(+Failing.failed)


class Evicting:
    """Two rows of 13 tokens, one a fork of the other, that are to keep 9 of them."""

    def __init__(self, policy):
        Failing.begin(0)
        self.pool, self.backend = Pool(24, 4), Failing(SPEC, 24)
        plan = Plan(self.pool, 1, 13, backend=self.backend)
        first = int(self.pool.open())
        self.pool.step(plan, [first], 13)
        self.pool.done(plan)
        self.handles = [first, int(self.pool.fork(first)[0])]
        for layer in range(SPEC.num_layers):
            self.backend.write(self.backend.prepare(plan), layer, vectors(layer, 13), vectors(layer + 9, 13))
        self.evictor = Evictor(policy, self.pool, self.backend, 2)
        scores = np.abs(np.random.default_rng(3).standard_normal((SPEC.num_layers, 2, 2, 13))).astype(np.float32)
        self.evictor.memory.observe(scores, np.array([13, 13]))

    def evict(self):
        self.evictor.evict(self.handles, np.arange(2), np.full(2, 9))

    def lens(self):
        return [self.pool.kv_len(handle) for handle in self.handles]

    def held(self):
        """Keys and values of both rows."""
        found = []
        for handle, length in zip(self.handles, self.lens(), strict=True):
            table = self.pool.table(handle)
            for layer in range(SPEC.num_layers):
                found += NumpyBackend.gather(self.backend, layer, table, length)
        return found


def same(found, due):
    return all(np.array_equal(a, b) for a, b in zip(found, due, strict=True))


@pytest.mark.parametrize("is_late", [False, True])
def test_eviction_that_the_backend_breaks_off_has_done_nothing_or_all_of_it_in_the_pool(is_late):
    peace = Evicting(HEAVIEST)
    before = peace.held()
    Failing.begin(0)
    peace.evict()
    total = Failing.made
    assert total == 3 and peace.lens() == [9, 9]  # copies, and a move for each row
    for number in range(1, total + 1):
        engine = Evicting(HEAVIEST)
        Failing.begin(number, is_late)
        with pytest.raises(Lost) as caught:
            engine.evict()
        engine.pool.check()
        assert engine.pool.stats().pending == 0
        if str(caught.value) == "compact":
            assert engine.lens() == [9, 9]
            continue
        assert engine.lens() == [13, 13] and same(engine.held(), before)
        engine.evict()
        assert engine.lens() == [9, 9] and same(engine.held(), peace.held())


@pytest.mark.parametrize("policy", [HEAVIEST, BlockEviction(max_kv=12)], ids=["tokens", "blocks"])
@pytest.mark.parametrize("row", [0, 1])
def test_choice_that_fails_leaves_every_row_as_it_was(policy, row, monkeypatch):
    engine, select = Evicting(policy), Memory.select
    before, data = engine.pool.fingerprint(), engine.held()

    def fail(memory, at, kv_len, target):
        if at == row:
            raise Lost("select")
        return select(memory, at, kv_len, target)

    with monkeypatch.context() as patch, pytest.raises(Lost, match="select"):
        patch.setattr(Memory, "select", fail)
        engine.evict()
    assert engine.pool.fingerprint() == before and same(engine.held(), data)
    engine.evict()
    assert engine.lens() == [9, 9]
