"""`check` names what is broken in the state of a pool, whatever the piece. Every invariant it recomputes can fail.

One rich state is built (sequences, a fork, raw references, evictable blocks, limbo, a pending copy), one 32-bit word
of it is changed, and `check` must name the damage. The same state unbroken passes.
"""

import re
from pathlib import Path

import pytest
from tests.verify._hooks import corrupt

from kvpool import Group, Plan, Pool
from kvpool.errors import CorruptState
from kvpool.retention import Keep

ROOT = Path(__file__).resolve().parents[2]
SHARED, RAW, CACHED, IN_LIMBO = 1, 4, 5, 6  # ids in the state below


def rich_pool():
    """Blocks: 1 shared tail with a pending copy, 2 its copy, 4 raw, 5 evictable, 6 in limbo, the rest blank."""
    pool = Pool(12, 4, max_seqs=4)
    plan = Plan(pool, 4, 16, table_width=4)
    parent = pool.open()
    pool.step(plan, [parent], 3)
    pool.done(plan)
    spare, raw, cached, limbo = (pool.blocks.alloc() for _ in range(4))  # 2, 3, 4, 5
    assert (spare, raw, cached, limbo) == (2, 3, 4, 5)
    more = pool.blocks.alloc()
    assert more == 6
    pool.blocks.free(spare)
    pool.blocks.mark_cached([limbo])
    pool.blocks.decref(limbo)  # 5: evictable
    pool.blocks.free(raw)  # 3 on top of the blank stack
    (child,) = pool.fork(parent)
    pool.step(plan, [child], 1)  # takes 3, copies 1 -> 3
    pool.blocks.free(more)  # 6: limbo, a step is pending
    assert plan.copies.tolist() == [[1, 3, 3]]
    stats = pool.stats()
    assert (stats.evictable, stats.limbo, stats.used) == (1, 1, 3)
    return pool, plan


def finding(pool, *changes):
    """What `check` says once each word, of an index, is so much more; all are put back."""
    for what, index, by in changes:
        corrupt(pool, what, index, by)
    try:
        pool.check()
    except CorruptState as error:
        return str(error)
    finally:
        for what, index, by in changes:
            corrupt(pool, what, index, -by)
    return ""


def indices(pool, what):
    """Of a word: all that there are."""
    for index in range(pool.num_blocks):
        try:
            corrupt(pool, what, index, 0)
        except AssertionError:
            return
        yield index


A, B = list(range(24)), [*range(8), *range(50, 66)]
WAITING = list(range(200, 216))
OLD_NODE, WARM_NODE, TAKEN = 1, 7, 3  # nodes and a checkpoint of the state below


def compute(pool, plan, prompt, commits):
    """Open a prompt and compute it in steps that end where a checkpoint is taken."""
    handle = pool.open([*prompt, 99], b"", len(prompt))
    while (length := pool.num_tokens(handle)) < len(prompt):
        place = int(pool.prefix.wanted([handle])[0])
        pool.step(plan, [handle], (place if place > 0 else len(prompt)) - length)
        pool.done(plan)
        if commits:
            pool.prefix.commit(handle, prompt[length : pool.num_tokens(handle)])
    return handle


def rich_tree():
    """Units with and without checkpoints, a hit that is not loaded, a save that is not done, entries that wait."""
    layers = [Group.full(), Group.window(8), Group.state(12, blocks=2)]
    pool = Pool(96, 4, groups=layers, prefix_cache=True, max_seqs=8, seed=1)
    plan, saving = Plan(pool, 4, 64), Plan(pool, 4, 64)
    for prompt in (A, B):
        pool.close(compute(pool, plan, prompt, True))
    pool.open([*A, 1])
    row = compute(pool, plan, WAITING, False)
    pool.fork(row)
    pool.unshare(plan, [row], 14)
    pool.prefix.commit(row, WAITING)
    pool.step(saving, [pool.open([*range(300, 309)], b"", 8)], 8)
    return pool


def windows():
    pool = Pool(64, 4, groups=[Group.full(), Group.window(6, columns=2)], max_seqs=8)
    plan = Plan(pool, 1, 16)
    pool.step(plan, [pool.open()], 9)
    pool.done(plan)
    return pool


def kept():
    """Node 0 is kept and was set aside, since it was its turn to leave; node 1 is kept and was not."""
    pool = Pool(6, 4, prefix_cache=True, seed=1)
    plan = Plan(pool, 1, 4)
    for first, keep in ((1, Keep(3, 100)), (2, None), (3, Keep(2, 100))):
        row = pool.open()
        pool.step(plan, [row], 4)
        pool.done(plan)
        pool.prefix.commit(row, [first] * 4, keep=keep)
        pool.close(row)
    assert pool.blocks.evict(1) == 1
    assert pool.prefix.match([1] * 5) == pool.prefix.match([3] * 5) == 4 and pool.prefix.match([2] * 5) == 0
    return pool


def pinned():
    """Slot 0 is a pin with a ttl."""
    pool = Pool(6, 4, prefix_cache=True, seed=1)
    pool.prefix.pin([1] * 4, ttl=100)
    return pool


def pending():
    return rich_pool()[0]


#: Words of which one more is found, each where it stands.
WORDS = {
    pending: {
        "refcount": (SHARED, 2),
        "raw": (RAW, SHARED),
        "hold": (SHARED, RAW),
        "floor": (SHARED, RAW),
        "next": (CACHED,),
        "prev": (IN_LIMBO,),
        "free_slot": (2,),
        **dict.fromkeys(("table", "length"), (0, 1)),
        **dict.fromkeys(
            ("blank", "num_blank", "num_used", "num_shared", "lru", "limbo", "num_dropped", "blocks"), (0,)
        ),
        **dict.fromkeys(("next_slot", "tail", "stop_slot", "sum_tokens", "sum_blocks", "num_open"), (0,)),
    },
    rich_tree: {
        **dict.fromkeys(("bucket", "cold", "warm", "checkpoints", "loads", "saves", "listed", "position"), (0,)),
        **dict.fromkeys(("users", "below", "parent", "hash", "tokens", "at_node"), (OLD_NODE, 9)),
        **dict.fromkeys(("node_stamp", "unit"), (WARM_NODE,)),
        **dict.fromkeys(("role", "stands_for"), (1, 2)),
        **dict.fromkeys(("slot_loads", "step", "bundle", "row"), (0, TAKEN)),
        "needed": (0, 5),
        "line": (1,),
        "published": (2,),
    },
    kept: {**dict.fromkeys(("reasons", "num_kept", "rank"), (0,))},
    pinned: {"pin_until": (1,)},
    windows: {
        **dict.fromkeys(("refcount", "num_used", "sum_tokens"), (3,)),
        **dict.fromkeys(("length", "table", "gone", "due"), (0,)),
    },
}


@pytest.mark.parametrize("make", WORDS)
def test_check_finds_a_broken_word_where_it_stands_and_nothing_in_a_sound_pool(make):
    pool = make()
    pool.check()
    for what, places in WORDS[make].items():
        for index in places:
            assert finding(pool, (what, index, 1)).startswith("[check] "), (what, index)
    pool.check()


#: Of the second and third pool nothing is on the LRU or limbo lists, and the last group of the second keeps states.
#: A flag that is two is set all the same.
SILENT = {"next", "prev", "lru", "tail", "due", "stamp", "point", "pending", "fence", "has_waiting"}
OUT_OF_RANGE = 1000
#: What no word finds that is one more.
CHANGES = [
    *((pending, [(what, 0, by)]) for what in ("num_blank", "num_dropped") for by in (-OUT_OF_RANGE, OUT_OF_RANGE)),
    *((pending, [(what, 0, -1)]) for what in ("num_blank", "num_dropped", "pending", "oldest_pending")),
    *((pending, [(what, 0, -OUT_OF_RANGE)]) for what in ("refcount", "raw", "hold", "num_used", "blank")),
    *((pending, [("point", 0, by)]) for by in (-OUT_OF_RANGE, OUT_OF_RANGE)),
    *((pending, [("place", block, by)]) for block, by in ((0, -1), (CACHED, 9))),
    *((pending, [("fence", block, by)]) for block, by in ((IN_LIMBO, OUT_OF_RANGE), (IN_LIMBO, -2))),
    (rich_tree, [("table", 2, -2)]),  # no state
    *((rich_tree, [("table", 3, by)]) for by in (-OUT_OF_RANGE, OUT_OF_RANGE)),
    (rich_tree, [("node_place", WARM_NODE, -1)]),
    (rich_tree, [("has_waiting", 0, -1)]),
    *((rich_tree, [("may_leave", checkpoint, -1)]) for checkpoint in (1, TAKEN)),
    (rich_tree, [("stamp", 1, -OUT_OF_RANGE)]),
    *((rich_tree, [("committed", block, -1)]) for block in (1, 15)),
    (rich_tree, [("role", 30, -8), ("entry", 11, 31)]),  # what waits for a copy is canonical
    *((kept, [(what, 0, 1)]) for what in ("rank", "reasons", "num_kept")),
    *((kept, [(what, 0, by)]) for what, by in (("now", 200), ("until", 5000))),
    *((pinned, [(what, at, by)]) for what, at, by in (("now", 0, 100), ("pin_until", 0, 5000), ("pin_until", 1, 5))),
    (kept, [("node_place", 2, 1), ("warm", 0, -1), ("warm_head", 0, -3), ("warm_tail", 0, -3)]),  # in no line
]


def test_check_finds_each_word_somewhere_and_has_no_finding_that_nothing_leads_to():
    """Every text that stands in the source is said."""
    said = [finding(make(), *changes) for make, changes in CHANGES]
    assert all(said), CHANGES[said.index("")]
    for make in (pending, rich_tree, windows):
        pool = make()
        for what in corrupt(pool, "", 0):
            found = [finding(pool, (what, index, 1)) for index in indices(pool, what)]
            assert any(found) or what in {"point", "pending"} or (make is not pending and what in SILENT), what
            said += found
        pool.check()
    for path in (ROOT / "kvpool/core").glob("*.pxi"):
        for parts in re.findall(r'snprintf\(finding, FINDING,\s*((?:b"[^"]*"\s*)+)', path.read_text()):
            text = "".join(re.findall(r'b"([^"]*)"', parts))
            pattern = r"\[check\] " + re.sub("%(lld|d|s)", ".+", re.escape(text))
            assert any(re.fullmatch(pattern, one) for one in said), text


def test_check_that_found_something_about_a_namespace_counts_anew():
    pool = Pool(16, 4, prefix_cache=True)
    pool.open([1, 2, 3])
    for _ in range(2):
        corrupt(pool, "namespace", 0)
        with pytest.raises(CorruptState, match="namespace"):
            pool.check()
        corrupt(pool, "namespace", 0, -1)
        pool.check()
