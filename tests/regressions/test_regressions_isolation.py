"""Family I: keys, collisions, isolation of tenants. See README.md."""

import itertools
import os
import subprocess
import sys

from prefixes import cache

from kvpool.namespaces import namespace

A, B = ([n] * 4 for n in (1, 2))


def test_i1_event_keys_do_not_depend_on_the_hash_seed_of_python():
    """CVE-2025-25183: keys built on Python's hash(), where hash(None) is a constant."""
    program = (
        "from kvpool import Plan, Pool\n"
        "pool = Pool(8, 2, prefix_cache=True, events=8); plan = Plan(pool, 1, 4)\n"
        "handle = pool.open([1, 2, 3, 4], b'x'); pool.step(plan, [handle], 4); pool.done(plan)\n"
        "pool.prefix.commit(handle, [1, 2, 3, 4]); print([event[1].hex() for event in pool.prefix.events()])\n"
    )
    seen = set()
    for seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(
            subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
        )
    assert len(seen) == 1 and len(seen.pop()) > 64


def test_i4_algebraic_neighbours_of_a_block_miss(make_pool, make_plan):
    """Megatron-LM PR4158: with a polynomial hash, one token + 31 and the next - 1 collided."""
    pool = make_pool(prefix_cache=True)
    block = [1000, 2000, 3000, 4000]
    cache(make_plan, pool, block)
    for j, factor in itertools.product(range(3), (2, 31, 33, 37, 131, 257, 1000)):
        for sign in (1, -1):
            near = list(block)
            near[j] += sign * factor if near[j] + sign * factor >= 0 else factor
            near[j + 1] -= sign
            assert pool.prefix.match([*near, 0]) == 0
    for order in itertools.permutations(block):
        assert pool.prefix.match([*order, 0]) == (4 if list(order) == block else 0)


def test_i8_keys_that_leave_the_pool_have_the_salt(make_pool, make_plan):
    """The salt was honoured in memory, and dropped in the keys of the next tier."""
    keys = []
    for salt in ("mine", "yours", "mine"):
        pool = make_pool(prefix_cache=True, events=8)
        cache(make_plan, pool, A + B, namespace(salt=salt))
        keys.append([event[1] for event in pool.prefix.events()])
    assert keys[0] == keys[2] and not set(keys[0]) & set(keys[1])
