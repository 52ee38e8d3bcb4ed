"""Programs that reach what random ones do not: each is a function of the classes `Pool` and `Plan`.

They assert nothing themselves: what they call, and what comes back, is recorded from the core and compared with the
plain Python model, which runs them too (test_proof_mutants.py). Those of `CORE_ONLY` use what the model lacks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.errors import KVPoolError

FORMATS = (
    *("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens"),
    *("csr", "kv_slots", "kv_slots_ragged", "slot_ids"),
)
ARRAYS = (
    *("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "indptr", "indices", "last_page_len"),
    *("kv_slots", "kv_slots_ragged", "kv_indptr", "slot_ids", "copies", "dirty_rows", "served"),
)
SCENARIOS: list[Callable[[Any, Any], None]] = []
CORE_ONLY: set[str] = set()


def scenario(program: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Put a program on the list."""
    SCENARIOS.append(program)
    return program


def core_only(program: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The same, of a program that the model cannot run."""
    CORE_ONLY.add(program.__name__)
    return scenario(program)


def look(pool: Any, *plans: Any) -> None:
    """Read everything."""
    for plan in plans:
        for name in ARRAYS:
            with contextlib.suppress(AttributeError, ValueError):
                getattr(plan, name)
        _ = plan.num_tokens, len(plan.copies), plan.copies[:, 2].sum(), plan.is_pending
    pool.stats()
    pool.check()


def place(pool: Any, name: str) -> tuple[Any, str]:
    """Who has a call and how it is named there: ``blocks.alloc`` is `alloc` of `pool.blocks`."""
    part, _, call = name.rpartition(".")
    return (getattr(pool, part) if part else pool), call


def tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns; None if it is refused."""
    with contextlib.suppress(KVPoolError, ValueError, TypeError, IndexError, OverflowError, MemoryError):
        return call(*args, **kwargs)


def grown(pool: Any, plan: Any, handles: list[int], new: Any) -> None:
    """A step that is done at once, and looked at."""
    pool.step(plan, handles, new)
    look(pool, plan)
    pool.done(plan)


@scenario
def numbers_of_every_size(Pool: Any, Plan: Any) -> None:
    """New tokens up to 2^63, against every limit that a plan has."""
    pool = Pool(40, 4, max_seqs=4, max_blocks_per_seq=6)
    plans = [
        Plan(pool, 4, 12, formats=FORMATS),
        Plan(pool, 4, 200, formats=FORMATS, table_width=3),
        Plan(pool, 2, 200, formats=FORMATS, kv_width=10),
        Plan(pool, 2, 24, formats=FORMATS, table_width=6, kv_width=24),
        Plan(pool, 2, 24, formats=("block_tables",), table_width=3),
    ]
    a, b = pool.open(), pool.open()
    grown(pool, plans[0], [a, b], [1, 2])
    for new in (-1, 0, 1, 9, 10, 11, 12, 13, 24, 25, 2**31, 2**62, 2**63 - 1):
        for plan in plans:
            for handles in ([a], [a, b]):
                for form in (new, [new] * len(handles)):
                    tried(pool.step, plan, handles, form)
                    look(pool, plan)
                    if plan.is_pending:
                        pool.rollback(plan)
                    tried(pool.reserve, plan, handles, form)
                    if plan.is_pending:
                        pool.rollback(plan)
                    tried(pool.can, handles, form)
    for _ in range(26):
        for plan in plans:
            if tried(pool.step, plan, [a, b], 1) is None and plan.is_pending:
                look(pool, plan)
                pool.done(plan)
        tried(pool.truncate, a, 25 - _)
    pool.shutdown()


@scenario
def one_token_at_a_time(Pool: Any, Plan: Any) -> None:
    """Decode to the limit of narrow plans, rows in turn, with duplicates, stale and foreign handles in each place."""
    for width, kv in ((2, None), (5, 9), (4, 16), (6, 17)):
        pool = Pool(64, 4, max_seqs=6, max_blocks_per_seq=6)
        plan = Plan(pool, 6, 6, formats=FORMATS, table_width=width, kv_width=kv)
        rows = [pool.open() for _ in range(4)]
        dead = pool.open()
        pool.close(dead)
        for turn in range(20):
            batch = rows[turn % 4 :] + rows[: turn % 4]
            tried(pool.step, plan, batch, 1)
            look(pool, plan)
            if plan.is_pending:
                pool.done(plan)
            for at in range(5 if turn < 6 else 0):  # later a batch has more than one thing wrong
                for wrong in (dead, batch[0], batch[-1], batch[0] ^ 1 << 20, batch[0] ^ 1 << 52, 0, -1):
                    tried(pool.step, plan, [*batch[:at], wrong, *batch[at:]], 1)
            if turn % 7 == 6:
                pool.truncate(batch[0], pool.num_tokens(batch[0]) // 2)
        pool.shutdown()


@scenario
def forks_that_all_write(Pool: Any, Plan: Any) -> None:
    """Shared tails: COW in one plan, in several pending ones, rolled back with rows closed in between."""
    for size, in_order in itertools.product((1, 3, 4), (False, True)):
        pool = Pool(600, size, max_seqs=60, in_order=in_order)
        plans = [Plan(pool, 50, 200, formats=FORMATS) for _ in range(3)]
        a = pool.open()
        grown(pool, plans[0], [a], 2 * size + 1) if not in_order else pool.step(plans[0], [a], 2 * size + 1)
        family = [a, *pool.fork(a, 45).tolist()]
        for at, plan in enumerate(plans):
            pool.step(plan, family[at * 3 :], 1 + at)
            look(pool, plan)
        if in_order:
            pool.shutdown()
            continue
        pool.close(family[4:9])
        look(pool)
        pool.rollback(plans[2])
        look(pool)
        more = pool.fork(family[20], 3).tolist()
        tried(pool.rollback, plans[1])
        pool.close(more)
        pool.done(plans[1])
        look(pool)
        pool.rollback(plans[2]) if plans[2].is_pending else None
        pool.done(plans[0])
        look(pool)
        young = pool.fork(family[20], 6).tolist()
        pool.step(plans[0], [*young, family[20]], 2)
        pool.close(young[1:4])
        look(pool, plans[0])
        pool.rollback(plans[0])
        look(pool)
        alone = pool.open()
        pool.step(plans[0], [alone], 2 * size - 1)
        pool.done(plans[0])
        pool.blocks.drain_evicted()
        pool.blocks.mark_cached(pool.table(alone))
        pool.step(plans[1], [alone, family[21]], 1)
        pool.close(alone)
        pool.rollback(plans[1])
        look(pool)
        pool.truncate(family[10:20], [size - 1] * 10)
        look(pool)
        pool.close(family[:4])
        pool.shutdown()


@scenario
def steps_that_end_in_every_order(Pool: Any, Plan: Any) -> None:
    """Three pending steps and blocks released between them, ended in each order, by done or by rollback."""
    for order, ends in itertools.product(itertools.permutations(range(3)), itertools.product((0, 1), repeat=3)):
        pool = Pool(60, 2, max_seqs=20)
        plans = [Plan(pool, 8, 20, formats=("block_tables", "slot_mapping")) for _ in range(3)]
        rows = [pool.open(3) for _ in range(4)]
        for at, plan in enumerate(plans):
            pool.step(plan, rows, [1 + at, 2, 1, 3])
            child = pool.fork(rows[at], 2).tolist()
            pool.truncate(child, [1, 0])
            pool.close(child[0])
            pool.blocks.free(pool.blocks.alloc(2))
        for at in order:
            tried(pool.rollback if ends[at] else pool.done, plans[at])
            look(pool, *plans)
        pool.close(rows[3])
        look(pool)
        pool.shutdown()


@scenario
def rollbacks_around_forks(Pool: Any, Plan: Any) -> None:
    """The newest of two steps is rolled back where sequences were forked in it, before it, and are closed or not."""
    for closed, earlier in itertools.product((0, 1, 2), (0, 1)):
        pool = Pool(60, 2, max_seqs=20)
        plans = [Plan(pool, 8, 20) for _ in range(2)]
        rows = [pool.open(4) for _ in range(3)]
        pool.step(plans[0], rows, [1, 2, 3])
        kept = pool.fork(rows[1], earlier).tolist()
        pool.step(plans[1], rows[:2], [2, 1])
        children = pool.fork(rows[0], 2).tolist()
        pool.close(children[:closed])
        tried(pool.rollback, plans[1])
        look(pool, *plans)
        pool.close(children[closed:])
        tried(pool.rollback, plans[1])
        look(pool, *plans)
        pool.done(plans[0])
        pool.close([*kept, *rows])
        pool.shutdown()


@scenario
def rows_that_come_and_go(Pool: Any, Plan: Any) -> None:
    """Static shapes: padded rows that held a sequence, sequences that come back, batches that shrink and grow."""
    for dtype, kv in (("int32", None), ("int64", 40)):
        pool = Pool(120, 4, max_seqs=12, max_blocks_per_seq=10)
        plan = Plan(pool, 6, 40, formats=FORMATS, dtype=dtype, kv_width=kv)
        rows = [pool.open() for _ in range(6)]
        grown(pool, plan, rows[:2], 0)
        pool.step(plan, [], [], pad_to=(6, 40))
        look(pool, plan)
        pool.done(plan)
        grown(pool, plan, rows[:2], 0)
        for batch, new in (
            ([0], [1]), ([], []), ([0], [4]), ([1, 0], [5, 4]), ([1], [1]), ([1, 0, 2], [0, 0, 9]), ([2, 0], [1, 1]),
            ([0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1]), ([3], [0]), ([3, 4], [1, 1]), ([4, 3], [1, 1]), ([5], [8]),
        ):  # fmt: skip
            for pad in (None, (6, 40), (len(batch), sum(new)), (min(6, len(batch) + 1), min(40, sum(new) + 2))):
                tried(pool.step, plan, [rows[i] for i in batch], new, pad_to=pad)
                look(pool, plan)
                if plan.is_pending:
                    pool.rollback(plan) if pad and pad[0] == 6 and len(batch) % 2 else pool.done(plan)
        grown(pool, plan, rows, 0)
        pool.truncate(rows[4:], [pool.num_tokens(row) - 1 for row in rows[4:]])
        grown(pool, plan, rows, 0)
        pool.truncate(rows[:3], [0, 1, 2])
        grown(pool, plan, rows, 1)
        plan.bind()
        grown(pool, plan, rows, 1)
        plan.bind(block_tables=np.full((6, 10), -5, dtype))
        grown(pool, plan, rows[:2], 1)
        pool.truncate(rows[:2], 0)
        for count in (2, 6):
            plan.bind(
                indptr=np.full(7, 77, dtype), last_page_len=np.full(6, 78, dtype), cu_q_lens=np.full(7, 79, dtype)
            )
            grown(pool, plan, rows[:count], 0)
        pool.shutdown()


@scenario
def blocks_by_hand(Pool: Any, Plan: Any) -> None:
    """Block-level calls around the number of blocks that there are."""
    pool = Pool(14, 3, max_seqs=3, reserved_blocks=2)
    for n in range(14):
        ids = tried(pool.blocks.alloc, n)
        if ids is None:
            continue
        pool.blocks.incref(ids[::2].copy())
        pool.blocks.incref(ids[::4].copy())
        look(pool)
        pool.blocks.drain_evicted()
        pool.blocks.mark_cached(ids[1::2].copy())
        pool.blocks.decref(ids)
        look(pool)
        pool.blocks.decref(ids[::2].copy())
        pool.blocks.decref(ids[::4].copy())
        pool.blocks.drain_evicted()
        look(pool)
        if n % 3 == 2:
            pool.blocks.touch(ids[1:2].copy())
            look(pool)
            pool.blocks.free(ids[1:2].copy())
        pool.blocks.evict(n % 4)
        look(pool)
        pool.blocks.drain_evicted()
    pool.blocks.refcount_histogram()
    pool.reset()
    look(pool)
    pool.shutdown()


@scenario
def reset_in_the_middle(Pool: Any, Plan: Any) -> None:
    """Reset with everything in use: holds, floors, limbo, cache, slots in the middle of the ring."""
    for cached in (False, True):
        pool = Pool(90, 2, max_seqs=10, prefix_cache=cached)
        plan, other = (Plan(pool, 9, 60, formats=("block_tables",)) for _ in range(2))
        for turn in range(3):
            rows = [pool.open(2) for _ in range(5)]
            grown(pool, plan, rows, [3, 4, 5, 6, 7])
            if cached:
                pool.prefix.commit(rows, np.arange(25, dtype=np.int32), [3, 4, 5, 6, 7])
            forks = pool.fork(rows[0], 3).tolist()
            pool.step(plan, [rows[0], *forks], 1)
            pool.step(other, forks, 2)
            pool.close(rows[1:3])
            if not cached:
                pool.blocks.drain_evicted()
                pool.blocks.mark_cached(pool.blocks.alloc(3))
            look(pool)
            pool.reset()
            look(pool)
            pool.blocks.drain_evicted() if not cached and turn % 2 else None
        pool.shutdown()


def prompts(pool: Any, plan: Any, texts: list[np.ndarray], keep: bool = False) -> list[int]:
    """Open each prompt, compute it, make it known; closed unless `keep`."""
    handles = []
    for text in texts:
        handle = tried(pool.open, text)
        if handle is None:
            continue
        start = pool.num_tokens(handle)
        pool.step(plan, [handle], len(text) - start)
        if plan.is_pending:
            pool.done(plan)
        pool.prefix.commit(handle, text[start:])
        pool.prefix.match(text)
        pool.check()
        if keep:
            handles.append(handle)
        else:
            pool.close(handle)
    return handles


@scenario
def prompts_of_many_lengths(Pool: Any, Plan: Any) -> None:
    """Prefixes that end around the groups of a lookup, in block sizes that hash in all their ways."""
    for size in (1, 2, 3, 4, 5, 8, 11):
        pool = Pool(240, size, max_seqs=4, prefix_cache=True)
        plan = Plan(pool, 1, 120 * size, formats=("block_tables",))
        text = (np.arange(110 * size, dtype=np.int32) * 7919) % 65521
        prompts(pool, plan, [text[: 75 * size + 1]])
        for blocks in (0, 1, 3, 4, 5, 31, 35, 36, 37, 67, 68, 69, 75, 76):
            for tail in (0, 1, size - 1):
                cut = text[: blocks * size + tail].copy()
                pool.prefix.match(cut)
                if len(cut):
                    cut[-1] += 1
                    pool.prefix.match(cut)
                    prompts(pool, plan, [cut])
        changed = text.copy()
        changed[2 * size : 3 * size] = 5
        pool.prefix.match(changed)
        prompts(pool, plan, [changed[: 9 * size], text[: 40 * size]])
        pool.blocks.evict(60)
        pool.prefix.match(text)
        pool.prefix.stats()
        look(pool)
        pool.shutdown()


@core_only
def hashes_that_collide(Pool: Any, Plan: Any) -> None:
    """A hash of few bits: probes pass over others and around the end; evictions close the gaps."""
    for bits, size in itertools.product((0, 1, 2, 3, 5), (2, 4)):
        pool = Pool(26, size, max_seqs=8, prefix_cache=True, _hash_bits=bits, events=50)
        plan = Plan(pool, 1, 80, formats=("block_tables",))
        texts = [np.arange(1 + i % 5 * size + i, dtype=np.int32) * (1 + i % 3) % 11 + i % 4 for i in range(40)]
        for turn, text in enumerate(texts):
            prompts(pool, plan, [text])
            if turn % 3 == 0:
                pool.blocks.evict(1 + turn % 4)
            for other in texts[max(0, turn - 6) : turn]:
                pool.prefix.match(other)
            look(pool)
        pool.prefix.stats()
        pool.prefix.events()
        pool.prefix.flush()
        look(pool)
        pool.shutdown()


@scenario
def duplicates_of_a_prefix(Pool: Any, Plan: Any) -> None:
    """Sequences that compute the same at once: canonical blocks, evicted, held, replaced by duplicates."""
    for size, evict, flush in itertools.product((1, 2), (0, 2, 50), (0, 1, 2)):
        pool = Pool(60, size, max_seqs=12, prefix_cache=True)
        plan = Plan(pool, 8, 60, formats=("block_tables",))
        text = np.arange(12 * size, dtype=np.int32)
        rows = [pool.open() for _ in range(4)]
        for first, last in ((0, 3), (3, 5), (5, 9), (9, 12)):
            new = text[first * size : last * size]
            grown(pool, plan, rows, len(new))
            for at, row in enumerate(rows):
                pool.prefix.commit(row, new + (at == 3 and first == 5))
                pool.prefix.stats()
                look(pool)
            if first == 3:
                pool.close(rows.pop(0))
                pool.blocks.evict(evict)
                pool.prefix.flush() if flush == 1 else pool.prefix.flush(b"") if flush == 2 else None
                look(pool)
                pool.prefix.match(text)
        for other in (100, 200):
            for row in rows:
                pool.truncate(row, 5 * size)
            grown(pool, plan, rows, 2 * size)
            for row in rows:
                pool.prefix.commit(row, np.arange(2 * size, dtype=np.int32) + other)
                pool.prefix.stats()
                look(pool)
        forks = pool.fork(rows[0], 2).tolist()
        pool.close(rows)
        pool.blocks.evict(evict)
        pool.prefix.match(text)
        look(pool)
        pool.close(forks)
        pool.blocks.evict(evict)
        pool.prefix.match(text)
        look(pool)
        pool.shutdown()


@scenario
def other_tokens_for_a_known_block(Pool: Any, Plan: Any) -> None:
    """Blocks that a fork has made known: the same tokens are welcome, one other token at any place is not."""
    pool = Pool(20, 8, max_seqs=4, prefix_cache=True)
    plan = Plan(pool, 2, 40, formats=("block_tables",))
    text = np.arange(20, dtype=np.int32)
    row = pool.open()
    grown(pool, plan, [row], 20)
    (child,) = pool.fork(row).tolist()
    pool.prefix.commit(row, text[:18])
    for at in range(18):
        other = text[:18].copy()
        other[at] += 1
        tried(pool.prefix.commit, child, other)
        look(pool)
        if at < 16:
            continue
        (twin,) = pool.fork(row).tolist()
        tried(pool.prefix.commit, twin, text[18:])
        tried(pool.prefix.commit, twin, text)
        pool.close(twin)
    tried(pool.prefix.commit, child, text)
    look(pool)
    pool.shutdown()


@scenario
def namespaces_apart(Pool: Any, Plan: Any) -> None:
    """The same tokens in several namespaces; one is flushed while a sequence in it runs."""
    pool = Pool(80, 2, max_seqs=12, prefix_cache=True)
    plan = Plan(pool, 8, 60, formats=("block_tables",))
    text = np.arange(11, dtype=np.int32)
    rows = [pool.open(text, name) for name in (b"", b"a", b"ab", b"a\0", b"b")]
    grown(pool, plan, rows, 11)
    for row in rows[:4]:
        pool.prefix.commit(row, text[:9])
    for name in (b"", b"a", b"ab", b"a\0", b"b", b"ba"):
        pool.prefix.match(text, name)
    pool.prefix.flush(b"a")
    look(pool)
    for row in rows[:4]:
        pool.prefix.commit(row, text[9:])
        look(pool)
    pool.close(rows[:2])
    for name in (b"", b"a", b"ab"):
        pool.prefix.match(text, name)
        row = pool.open(text, name)
        look(pool)
        pool.close(row)
    pool.prefix.flush(b"ab")
    pool.prefix.flush(b"")
    look(pool)
    pool.prefix.flush()
    pool.prefix.stats()
    look(pool)
    pool.shutdown()


@scenario
def cached_blocks_in_limbo(Pool: Any, Plan: Any) -> None:
    """A hit on a block that still waits for a step, and one on a block that waits no longer."""
    pool = Pool(30, 2, max_seqs=8, prefix_cache=True)
    plan, other = (Plan(pool, 4, 20, formats=("block_tables",)) for _ in range(2))
    text = np.arange(9, dtype=np.int32)
    (row,) = prompts(pool, plan, [text], keep=True)
    side = pool.open()
    pool.step(other, [side], 3)
    pool.close(row)
    look(pool)
    again = pool.open(text)
    look(pool)
    pool.done(other)
    look(pool)
    pool.close(again)
    look(pool)
    pool.open(text)
    look(pool)
    while tried(pool.open, 2) is not None:
        look(pool)
    pool.shutdown()


@core_only
def events_of_many_blocks(Pool: Any, Plan: Any) -> None:
    """More events in one call than there was room for."""
    pool = Pool(300, 2, max_seqs=8, prefix_cache=True, events=400)
    plan = Plan(pool, 1, 400, formats=("block_tables",))
    for length in (3, 40, 150, 300):
        prompts(pool, plan, [np.arange(length, dtype=np.int32) + length])
        pool.prefix.events()
    pool.blocks.evict(200)
    pool.prefix.events()
    pool.prefix.flush()
    pool.prefix.events()
    pool.shutdown()


@core_only
def counts_at_the_end_of_64_bits(Pool: Any, Plan: Any) -> None:
    """A length that just is a number, and one that is none."""
    pool = Pool(8, 4, max_seqs=2)
    plan, handle = Plan(pool, 2, 8), pool.open()
    grown(pool, plan, [handle], 3)
    for new in (2**63 - 5, 2**63 - 4, 2**63 - 3, 2**63 - 1):
        tried(pool.step, plan, [handle], [new])
        tried(pool.reserve, plan, [handle], [new])
    pool.shutdown()


@core_only
def last_generation(Pool: Any, Plan: Any) -> None:
    """A slot whose handles are used up retires; the others go round."""
    pool = Pool(20, 2, max_seqs=3)
    for slot, generation in ((0, 2**32 - 1), (1, 2**32 - 2), (2, 5)):
        pool._set_generation(slot, generation)
    for _ in range(6):
        opened = []
        while (handle := tried(pool.open)) is not None:
            opened.append(handle)
            look(pool)
        pool.close(opened[::-1])
        look(pool)
    pool.reset()
    look(pool)
    for _ in range(4):
        tried(pool.open)
    pool.shutdown()


@core_only
def bytes_of_an_index(Pool: Any, Plan: Any) -> None:
    """The size of the index, from which slots * 3 / 4 >= blocks can be read."""
    for blocks, size in itertools.product((2, 3, 6, 7, 8, 9, 12, 13, 24, 25, 48, 49, 96, 97), (1, 4)):
        pool = Pool(blocks, size, max_seqs=2, prefix_cache=True, events=blocks % 2)
        prefix = pool.prefix
        _ = prefix.nbytes
        pool.shutdown()
        _ = prefix.nbytes
