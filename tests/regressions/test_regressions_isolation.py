"""Family I: keys, collisions, isolation of tenants. See README.md."""

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from prefixes import cache

from kvpool.namespaces import namespace

A, B = ([n] * 4 for n in (1, 2))


def digest(image):
    """Of everything that decides what an image is."""
    return hashlib.sha256(repr((image.shape, image.dtype.str)).encode() + image.tobytes()).digest()


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


PIXELS, WHOLE = np.zeros((30, 150), np.uint8), hashlib.sha256(b"image").digest()
FIELDS = {
    "i3 CVE-2025-46570: the salts of two tenants": [{"salt": "mine"}, {"salt": "yours"}, {}],
    "i6 vllm#44701, sglang#24638: an adapter and a salt of one name": [{"lora": "a"}, {"salt": "a"}, {}],
    "i7 vllm#30931: an adapter with new weights under an old name": [
        {"lora": hashlib.sha256(weights).digest()} for weights in (b"old", b"new")
    ],
    "i9 sglang#33268, #24758: the model, and the format of its KV": [
        {"model": model, "kv_dtype": dtype} for model in ("one", "two") for dtype in ("float16", "int8")
    ],
    "i10: an image of another shape with the same bytes": [
        {"multimodal": [(0, digest(image))]} for image in (PIXELS, PIXELS.T.copy())
    ],
    "i11 LMCache#3301: digests that differ in one bit": [
        {"multimodal": [(0, digest)]}
        for digest in (WHOLE, *(WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :] for at in range(32)))
    ],
    "i12 vllm PR49975, ATOM PR1358: two images behind equal placeholder tokens": [
        *({"multimodal": [(0, digest)]} for digest in (b"cat", b"dog")),
        {},
    ],
    "i13 confidential-model-router PR386: fields that join to one text": [
        {"salt": "org_1", "lora": "2345"},
        {"salt": "org_12345", "lora": ""},
    ],
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_i3_i6_i7_i9_i10_i11_i12_i13_prompt_of_another_namespace_misses(make_pool, make_plan, fields):
    spaces = [namespace(**named) if named else b"" for named in fields]
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, spaces[0])
    assert [pool.prefix.match(A + B, space) for space in spaces] == [4] + [0] * (len(spaces) - 1)
