"""Is this a correct store? Cases that every `kvpool.store.BlockStore` has to pass.

``check_store(factory)`` runs all; ``CASES`` has them one by one. ``factory(layout, place)`` opens a store: the same
place twice is the same content, seen by two. A store that lives in its process alone ignores `place`, and is checked
with ``shared=False``. A place that was not named before is empty.

No case asks the store what is right: every block has bytes that are drawn from its own key.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvpool.store import BlockLayout, Blocks, BlockStore, Layout, leading
from kvpool.testing.filled import collector, need, refused, run_cases

Factory = Callable[[Layout, str], BlockStore]
Case = Callable[[Factory, str, bool], None]
CASES: list[Case] = []
_case = collector(CASES)
SECONDS = 20.0  # until another's blocks are seen

LAYOUT = Layout((BlockLayout(4, 700, "full"), BlockLayout(8, 1000, "window 16"), BlockLayout(8, 64, "state")), "w")


def check_store(
    factory: Factory, place: str = "", *, shared: bool = True, cases: Sequence[Case] | None = None
) -> dict[str, str]:
    """Run all cases, or those given, each at a place of its own below `place`.

    Returns
    -------
    dict
        Case name to "passed" or "not applicable".

    Raises
    ------
    AssertionError
        Some case failed. The message names every case that did, and how; the first failure is chained.
    """
    every = CASES if cases is None else cases
    return run_cases(every, lambda case: case(factory, f"{place}{case.__name__}", shared))


def content(layout: Layout, blocks: Blocks) -> np.ndarray:
    """Rows of the kit for these names, uint8 ``[n, nbytes]``: drawn from key, parent, namespace and group."""
    nbytes = layout.groups[blocks.group].nbytes
    rows = np.empty((len(blocks), nbytes), np.uint8)
    for number in range(len(blocks)):
        seed = blocks.keys[number].tobytes() + blocks.parents[number].tobytes() + blocks.namespace
        rng = np.random.default_rng([*seed, *blocks.tokens[number].tolist(), blocks.group])
        rows[number] = rng.integers(0, 256, nbytes, np.uint8)
    return rows


def loads(store: BlockStore, blocks: Blocks, expected: Sequence[int] | None = None) -> np.ndarray:
    """Load, and compare every byte of what is said to be loaded; and which were, if that is known."""
    rows = np.full((len(blocks), store.layout.groups[blocks.group].nbytes), 0xA5, np.uint8)
    loaded = store.load(blocks, rows)
    assert loaded.shape == (len(blocks),) and loaded.dtype == bool, f"load returned {loaded!r}"
    wrong = np.flatnonzero((rows != content(store.layout, blocks)).any(1) & loaded)
    assert not wrong.size, f"wrong hits: blocks {wrong.tolist()} of group {blocks.group} have other bytes"
    if expected is not None:
        found = np.flatnonzero(loaded).tolist()
        assert found == list(expected), f"loaded blocks {found}, expected {list(expected)}"
    return loaded


def stores(store: BlockStore, blocks: Blocks) -> np.ndarray:
    """Store the kit's content, wait for it, and return what was given; a short queue is offered it again."""
    rows = content(store.layout, blocks)
    end = time.monotonic() + SECONDS
    while store.store(blocks, rows) < len(blocks) and time.monotonic() < end:
        store.drain(1.0)
    assert store.drain(SECONDS), "drain came to no end"
    return rows


def prompt(seed: int, length: int = 60) -> np.ndarray:
    """Tokens of a prompt."""
    return np.random.default_rng(seed).integers(0, 50_000, length)


def seen(store: BlockStore, blocks: Blocks) -> None:
    """Wait until a store knows of these blocks, and load them."""
    end = time.monotonic() + SECONDS
    while not store.lookup(blocks).all() and time.monotonic() < end:
        time.sleep(0.01)
    loads(store, blocks, range(len(blocks)))


@_case
def protocol_is_implemented(factory: Factory, place: str, shared: bool) -> None:
    """All methods are there, and an empty store has nothing."""
    store = factory(LAYOUT, place)
    assert isinstance(store, BlockStore), "a method or attribute of BlockStore is missing"
    assert store.layout.digest == LAYOUT.digest
    for blocks in LAYOUT.blocks(prompt(1)):
        assert not store.lookup(blocks).any() and len(blocks)
        loads(store, blocks, [])
        loads(store, blocks[:0], [])
    stats = store.stats()
    assert stats and all(tier.hits == 0 for tier in stats.values()), stats
    store.close()


@_case
def blocks_come_back(factory: Factory, place: str, shared: bool) -> None:
    """Every group; whole prompts, parts of them, in any order, one block twice."""
    store = factory(LAYOUT, place)
    for group, blocks in enumerate(LAYOUT.blocks(prompt(2))):
        rows = stores(store, blocks)
        assert leading(store.lookup(blocks)) == len(blocks), f"group {group}: lookup misses what was stored"
        loads(store, blocks, range(len(blocks)))
        loads(store, blocks[::-1], range(len(blocks)))
        loads(store, blocks[[2, 0, 2, 1]], range(4))
        apart = [np.zeros_like(row) for row in rows]
        assert store.load(blocks, apart).all() and (np.array(apart) == content(LAYOUT, blocks)).all(), "wrong bytes"
        rows[:] = 0  # the caller's memory is the caller's
        loads(store, blocks, range(len(blocks)))
    store.close()


@_case
def what_was_not_stored_is_a_miss(factory: Factory, place: str, shared: bool) -> None:
    """Blocks behind, between, before those that were stored, and other prompts with a common beginning."""
    store = factory(LAYOUT, place)
    blocks = LAYOUT.blocks(prompt(3))[0]
    stores(store, blocks[[1, 2, 5]])
    assert np.flatnonzero(store.lookup(blocks)).tolist() == [1, 2, 5]
    loads(store, blocks, [1, 2, 5])
    other = prompt(3)
    other[4] += 1  # in block 1
    loads(store, LAYOUT.blocks(other)[0], [])
    stores(store, blocks[[1, 2, 5]])  # again: nothing changes
    loads(store, blocks, [1, 2, 5])
    store.close()


@_case
def namespaces_share_nothing(factory: Factory, place: str, shared: bool) -> None:
    """Each tenant loads what it stored and nothing else, every pair of them, with planted keys too."""
    store = factory(LAYOUT, place)
    names = [b"", b"tenant", b"tenant2", b"\0", b"tenant" * 50]
    blocks = {name: LAYOUT.blocks(prompt(4), name)[0] for name in names}
    for name in names[:-1]:
        stores(store, blocks[name])
    loads(store, blocks[names[-1]], [])
    for name in names[:-1]:
        loads(store, blocks[name], range(len(blocks[name])))
    for own, foreign in itertools.permutations(names[:-1], 2):
        theirs = blocks[foreign]
        loads(store, Blocks(theirs.keys, theirs.parents, theirs.tokens, blocks[own].namespace, 0), [])
    store.close()


@_case
def a_key_alone_proves_nothing(factory: Factory, place: str, shared: bool) -> None:
    """A key with other tokens, another parent, another group is a miss, and harms no one."""
    store = factory(LAYOUT, place)
    one, two = LAYOUT.blocks(prompt(5))[0], LAYOUT.blocks(prompt(6))[0]
    stores(store, one)
    everything = range(len(one))
    loads(store, Blocks(one.keys, one.parents, two.tokens, one.namespace, 0), [])
    loads(store, one, everything)
    loads(store, Blocks(one.keys, two.parents, one.tokens, one.namespace, 0)[1:], [])
    loads(store, one, everything)
    one = LAYOUT.blocks(prompt(7))[1]
    state = Blocks(one.keys, one.parents, one.tokens, one.namespace, 2)
    stores(store, one)
    loads(store, state, [])
    stores(store, state)
    loads(store, state, range(len(state)))
    loads(store, one, range(len(one)))
    store.close()


@_case
def a_wrong_argument_raises_and_changes_nothing(factory: Factory, place: str, shared: bool) -> None:
    """Rows and names that do not fit the layout."""
    store = factory(LAYOUT, place)
    blocks = LAYOUT.blocks(prompt(8))[0]
    rows = content(LAYOUT, blocks)
    locked = rows.copy()
    locked.flags.writeable = False
    for call, error, other, given in (
        ("store", ValueError, blocks, rows[:-1]),
        ("store", ValueError, blocks, rows[:, :-1]),
        ("store", TypeError, blocks, rows.view(np.int8)),
        ("load", ValueError, blocks, locked),
        ("load", ValueError, blocks, np.zeros((len(rows), 1400), np.uint8)[:, ::2]),
        ("store", ValueError, Blocks(blocks.keys, blocks.parents, blocks.tokens, blocks.namespace, 9), rows),
        ("load", ValueError, Blocks(blocks.keys[:, :8], blocks.parents, blocks.tokens, blocks.namespace), rows),
        ("store", TypeError, Blocks(blocks.keys, blocks.parents, blocks.tokens * 1.0, blocks.namespace), rows),
        ("lookup", TypeError, [b"key"], None),
    ):
        arguments = (other,) if given is None else (other, given)
        refused(partial(getattr(store, call), *arguments), error, f"a wrong argument of {call}", call)
    assert not store.lookup(blocks).any(), "a refused call stored something"
    store.close()


@_case
def a_closed_store_has_nothing(factory: Factory, place: str, shared: bool) -> None:
    """After close every call is a miss, and close may come twice."""
    store = factory(LAYOUT, place)
    blocks = LAYOUT.blocks(prompt(9))[0]
    stores(store, blocks)
    store.close()
    assert not store.lookup(blocks).any()
    loads(store, blocks, [])
    assert store.store(blocks, content(LAYOUT, blocks)) == 0, "a closed store says that it keeps blocks"
    store.touch(blocks)
    assert store.drain(1.0)
    store.close()


@_case
def threads_get_their_own_blocks(factory: Factory, place: str, shared: bool) -> None:
    """Eight threads store and load at once, the same prompts and others."""
    store = factory(LAYOUT, place)

    def work(number: int) -> int:
        hits = 0
        for turn in range(12):
            for blocks in LAYOUT.blocks(prompt(20 + (number + turn) % 6), b"%d" % (turn % 2)):
                store.store(blocks, content(LAYOUT, blocks))
                store.touch(blocks)
                store.lookup(blocks)
                hits += int(loads(store, blocks).sum())
        return hits

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.drain(SECONDS)
    for seed in range(20, 26):
        stores(store, LAYOUT.blocks(prompt(seed), b"0")[0])
        loads(store, LAYOUT.blocks(prompt(seed), b"0")[0], range(15))
    store.close()


@_case
def a_random_program_has_no_wrong_hit(factory: Factory, place: str, shared: bool) -> None:
    """Prompts with common beginnings, stored and loaded in parts; what was stored and drained is found."""
    rng, store = np.random.default_rng(10), factory(LAYOUT, place)
    known: set[tuple[bytes, int]] = set()
    stem = prompt(11)
    for _ in range(60):
        tokens = np.append(stem[: rng.integers(0, 60)], prompt(int(rng.integers(0, 4)), 30))
        blocks = LAYOUT.blocks(tokens, rng.choice([b"a", b"b"]))[rng.integers(0, 3)]
        if not len(blocks):
            continue
        blocks = blocks[rng.permutation(len(blocks))[: rng.integers(1, len(blocks) + 1)]]
        if rng.random() < 0.5:
            stores(store, blocks)
            known |= {(key.tobytes(), blocks.group) for key in blocks.keys}
        is_known = [(key.tobytes(), blocks.group) in known for key in blocks.keys]
        assert store.lookup(blocks).tolist() == is_known, "lookup finds other blocks than were stored"
        loads(store, blocks, np.flatnonzero(is_known).tolist())
    store.close()


@_case
def another_sees_what_was_stored(factory: Factory, place: str, shared: bool) -> None:
    """Two stores at one place, both write; then both are closed, and a third finds everything."""
    need(shared)
    one, two = factory(LAYOUT, place), factory(LAYOUT, place)
    blocks, others = LAYOUT.blocks(prompt(12)), LAYOUT.blocks(prompt(13))
    for group in range(3):
        stores(one, blocks[group])
        stores(two, others[group])
    for group in range(3):
        seen(two, blocks[group])
        seen(one, others[group])
    one.close()
    two.close()
    three = factory(LAYOUT, place)
    for group in range(3):
        seen(three, blocks[group])
        seen(three, others[group])
    three.close()


@_case
def another_layout_shares_nothing(factory: Factory, place: str, shared: bool) -> None:
    """Other weights, bits or sizes at the same place: refused with `ValueError`, or a miss."""
    need(shared)
    store = factory(LAYOUT, place)
    blocks = LAYOUT.blocks(prompt(14))[0]
    stores(store, blocks)
    full, *rest = LAYOUT.groups
    for other in (
        Layout(LAYOUT.groups, "v"),
        Layout((BlockLayout(4, 700, "full, 8 bits"), *rest), "w"),
        Layout((BlockLayout(4, 704, "full"), *rest), "w"),
        Layout((full,), "w"),
    ):
        try:
            foreign = factory(other, place)
        except ValueError:
            continue
        time.sleep(0.1)
        loads(foreign, other.blocks(prompt(14))[0], [])
        foreign.close()
    loads(store, blocks, range(len(blocks)))
    store.close()
