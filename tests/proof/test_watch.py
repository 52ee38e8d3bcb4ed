"""`proof.fuzz.watched.Watched` finds planted faults, and reports none where there is none."""

import kvpool
from proof.fuzz.watched import Watched


def test_step_that_never_runs_hides_nothing_from_an_older_one():
    """An older plan reads what a younger one, rolled back before it ran, would have overwritten."""
    pool = Watched(kvpool.Pool(4, 16, max_seqs=2))
    first, second = pool.plan(2, 32), pool.plan(2, 32)
    parent = pool.open(0)
    pool.step(first, [parent], [2])
    pool.step(second, [parent], [0])
    pool.done(first)
    [child] = pool.fork(parent, 1).tolist()
    pool.close([parent])
    pool.truncate(child, 1)
    pool.step(first, [child], [1])
    pool.rollback(first)
    pool.done(second)
    pool.close([child])
