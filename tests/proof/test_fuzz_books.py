"""The judge's books: they know no pool, and they say what a pool must do where a fault would be rare."""

import re
from pathlib import Path

import numpy as np

import kvpool
import proof.fuzz
from kvpool import Pool
from proof.fuzz.ranks import ranks_agree

FUZZ = Path(proof.fuzz.__file__).parent
OWN = ("proof.fuzz._books", "proof.fuzz._storage")


def core_imports(name):
    """What a source of the fuzzer takes from the core."""
    text = (FUZZ / name).read_text()
    modules = re.findall(r"^(?:from|import|cimport) ((?:kvpool|proof)[\w.]*)", text, re.MULTILINE)
    return [module for module in modules if not module.startswith(OWN)]


def test_fuzz_books_import_nothing_from_the_core():
    sources = [path.name for path in FUZZ.glob("_books*.p[yx][xd]")] + ["_storage.pyx", "_storage.pxd"]
    assert len(sources) >= 8
    assert [name for name in sources if core_imports(name)] == []


def test_only_one_source_of_the_driver_reaches_into_a_pool():
    drivers = [path.name for path in FUZZ.glob("_fuzz*.pyx")]
    reach = re.compile(r"pool\.state\b|Pool pool")
    assert drivers and [name for name in drivers if reach.search((FUZZ / name).read_text())] == []


def step(pool, plan, handle, n):
    pool.step(plan, [handle], n)
    if not pool.options.in_order:
        pool.done(plan)


def test_unshare_in_an_in_order_pool_keeps_the_tokens_of_its_copies():
    pool = Pool(8, 4, prefix_cache=True, in_order=True, seed=1)
    plan = kvpool.Plan(pool, 1, 8)
    handle = pool.open()
    step(pool, plan, handle, 4)
    pool.prefix.commit(handle, [1, 2, 3, 4])
    pool.unshare(plan, [handle], 3)
    pool.truncate(handle, 2)
    step(pool, plan, handle, 2)
    pool.prefix.commit(handle, [7, 8])
    assert pool.prefix.match([1, 2, 7, 8, 9]) == 4
    assert pool.prefix.stats().nodes == 2


def test_block_that_a_hit_revived_waits_for_no_step_later():
    pool = Pool(2, 1, prefix_cache=True, seed=1)
    plan, other = kvpool.Plan(pool, 1), kvpool.Plan(pool, 1)
    for _ in range(50):  # a cached block has the number of blocks taken so far, which is no step's
        pool.blocks.free(pool.blocks.alloc())
    handle = pool.open()
    step(pool, plan, handle, 1)
    pool.prefix.commit(handle, [6])
    pool.close(handle)
    pinned = pool.prefix.pin([6])
    pool.prefix.flush()
    pool.close(pinned)
    handle = pool.open()
    step(pool, plan, handle, 1)
    pool.step(other, [handle], 0)
    pool.prefix.commit(handle, [9])
    assert pool.prefix.match([9, 0]) == 1


def test_row_behind_a_restored_block_goes_on_when_another_row_commits_that():
    pool = Pool(8, 2, prefix_cache=True, seed=1)
    plan, other = kvpool.Plan(pool, 2, 8), kvpool.Plan(pool, 2, 8)
    parent = pool.open()
    step(pool, plan, parent, 2)
    [child] = pool.fork(parent).tolist()
    step(pool, plan, parent, 2)
    pool.step(plan, [child], 0)
    pool.unshare(other, [parent], 3)
    pool.prefix.commit(parent, [1, 1, 2, 0])
    assert pool.prefix.stats().nodes == 0
    pool.rollback(other)
    pool.prefix.commit(child, [1, 1])
    assert pool.prefix.stats().nodes == 1
    pool.done(plan)
    assert pool.prefix.stats().nodes == 2 and pool.prefix.match([1, 1, 2, 0, 5]) == 4


def test_rollback_leaves_committed_bits_of_a_pool_without_index_to_its_engine():
    pool = Pool(4, 2)
    plan = kvpool.Plan(pool, 1)
    handle = pool.open(1)
    pool.blocks.mark_cached(1)
    pool.step(plan, [handle])
    pool.blocks.mark_cached(2)
    pool.rollback(plan)
    assert pool.stats().evictable == 1
    pool.blocks.touch(2)
    assert np.array_equal(pool.table(handle), [1])


class Blind(Pool):
    """Its digest is always the same."""

    def digest(self):
        return 1


def test_ranks_with_other_tokens_differ_and_a_blind_digest_is_detected():
    options = {"num_blocks": 8, "block_size": 4, "reserved_blocks": 1, "max_blocks_per_seq": None}
    options |= {"prefix_cache": True, "seed": 1}
    assert all(ranks_agree(Pool, options, a, 77 * a) is None for a in range(30))
    assert "equal digests" in ranks_agree(Blind, options, 3, 5)
