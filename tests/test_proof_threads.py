"""What `proof.threads` runs, without ThreadSanitizer: `make test-metal` and `make proof` run it with."""

import pytest

from proof import SHORT, threads, threads_run


def test_calls_of_many_threads_are_refused_and_corrupt_nothing():
    assert "refused with ConcurrentUse" in threads_run.pool_with_the_busy_flag(0)


def test_pool_that_lets_calls_in_is_convicted(monkeypatch):
    """No call is ever refused: the case says that it tests nothing, or the pool's invariants are gone."""

    class Careless(threads_run.kvpool.Pool):
        def step(self, plan, handles, num_new):
            return super().step(plan, handles, [int(n.__index__()) for n in num_new])

    monkeypatch.setattr(threads_run, "new_pool", lambda: Careless(200, 4, max_seqs=40, max_blocks_per_seq=12, seed=1))
    with pytest.raises(AssertionError, match="tests nothing"):
        threads_run.pool_with_the_busy_flag(0)


def test_machine_without_setarch_is_told_so(monkeypatch):
    monkeypatch.setattr(threads.shutil, "which", lambda name: None)
    figure = threads.measure(SHORT)
    assert not figure.holds and "refused here" in figure.notes
