"""Tenants, adapters, images: the same namespace hits, every other one misses."""

from __future__ import annotations

import itertools

import pytest
from prefixes import cache

from kvpool.namespaces import namespace

PROMPT, MORE = [1, 2, 3, 4], [1, 2, 3, 4, 5]

SPACES = {
    "nothing": namespace(),
    "salt": namespace(salt="a"),
    "salt as bytes": namespace(salt=b"a"),
    "another salt": namespace(salt="b"),
    "empty salt": namespace(salt=""),
    "lora": namespace(lora="a"),
    "salt and lora": namespace(salt="a", lora="b"),
    "swapped": namespace(salt="b", lora="a"),
    "joined": namespace(salt="ab"),
    "image": namespace(multimodal=[(0, b"x")]),
    "image elsewhere": namespace(multimodal=[(1, b"x")]),
    "another image": namespace(multimodal=[(0, b"y")]),
    "model": namespace(model="a"),
    "dtype": namespace(dtype="a"),
}


@pytest.mark.parametrize("mine", SPACES)
def test_same_namespace_hits_and_every_other_misses(make_pool, make_plan, mine):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT, SPACES[mine])
    assert {name: pool.prefix.match(MORE, space) for name, space in SPACES.items()} == {
        name: 4 if name == mine else 0 for name in SPACES
    }


def test_namespaces_never_share_a_block(make_pool, make_plan):
    pool = make_pool(32, prefix_cache=True)
    blocks = {name: cache(make_plan, pool, PROMPT, space) for name, space in SPACES.items()}
    for one, other in itertools.combinations(blocks.values(), 2):
        assert not set(one) & set(other)
    for name, space in SPACES.items():
        assert pool.table(pool.open(MORE, space)).tolist()[0] == blocks[name][0]
    assert pool.prefix.stats().namespaces == pool.prefix.stats().nodes == len(SPACES)
    assert pool.prefix.stats().duplicates == 0


def test_one_namespace_depends_on_another_only_through_capacity(make_pool, make_plan):
    # The same requests of one tenant, alone and beside another tenant with the same prompts, where blocks abound.
    def run(noise):
        pool, seen = make_pool(64, prefix_cache=True, events=64), []
        for length in (5, 9, 3, 12, 12, 9):
            prompt = list(range(length))
            seen.append((pool.prefix.match(prompt, b"a"), len(cache(make_plan, pool, prompt, b"a"))))
            if noise:
                cache(make_plan, pool, list(range(length + 2)), b"b")
        events = [e for e in pool.prefix.events() if e[0] != "stored" or e[-1] == b"a"]
        return seen, [tuple(map(str, e)) for e in events]

    assert run(noise=True) == run(noise=False)


def test_namespace_is_compared_as_bytes_whatever_it_holds(make_pool, make_plan):
    pool = make_pool(64, prefix_cache=True)
    spaces = [b"", b"\0", b"\0\0", b"a", b"a\0", b"\0a", b"a" * 1000, b"a" * 1001, bytes(range(256))]
    for space in spaces:
        assert pool.prefix.match(MORE, space) == 0
        cache(make_plan, pool, PROMPT, space)
    assert [pool.prefix.match(MORE, space) for space in spaces] == [4] * len(spaces)


def test_fork_stays_in_its_namespace(make_pool, make_plan, grow):
    pool = make_pool(prefix_cache=True)
    parent = pool.open(PROMPT, b"a")
    grow(pool, parent, 4)
    child = int(pool.fork(parent)[0])
    pool.prefix.commit(child, PROMPT)
    assert (pool.prefix.match(MORE, b"a"), pool.prefix.match(MORE)) == (4, 0)


def test_many_namespaces_without_blocks_are_forgotten(make_pool):
    # A salt per request must not fill the memory.
    pool = make_pool(prefix_cache=True)
    for i in range(5000):
        pool.close(pool.open([1], b"%d" % i))
    assert pool.prefix.stats().namespaces <= 2100
