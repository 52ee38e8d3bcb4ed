"""Family I: keys, collisions, isolation of tenants. See README.md."""

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
from catalogue import Unchecked, broken, row
from prefixes import cache, serve

from kvpool.namespaces import namespace

A, B = ([n] * 4 for n in (1, 2))


PYTHON_HASHES = """
from kvpool._core import PrefixCache

class Prefix(PrefixCache):
    def events(self):
        return [(event[0], str(hash(("salt", *event[3]))).encode() * 2) for event in super().events()]

class Pool(Pool):
    prefix = property(lambda pool: Prefix(pool))
"""


def untagged(**fields):
    """Values without names."""
    return repr([value for value in fields.values() if value]).encode()


def joined(**fields):
    """Values one after the other, as one text."""
    return "".join(fields.values()).encode()


def tokens_only(**fields):
    """Who asks, for which model and format, decides nothing."""
    return b""


def cut_digests(*, multimodal=()):
    """Digests of 16 bits."""
    return namespace(multimodal=[(at, digest[:2]) for at, digest in multimodal])


def digest(image):
    """Of everything that decides what an image is."""
    return hashlib.sha256(repr((image.shape, image.dtype.str)).encode() + image.tobytes()).digest()


class HashIsTheBlock(Unchecked):
    """Equal hashes are taken for equal tokens."""

    def _path(self, tokens, namespace, most):
        def sums(depth, found):
            return [sum(found[i : i + self.block_size]) % 4 for i in range(0, depth * self.block_size, self.block_size)]

        return [
            node
            for depth in range(1, most + 1)
            for node in self._nodes.values()
            if len(node.prefix) == depth * self.block_size and sums(depth, node.prefix) == sums(depth, tokens)
        ][:most]


class KeysWithoutSalt(Unchecked):
    """The salt counts in the pool, but not in the keys that leave it."""

    def _note(self, *event):
        if event[0] == "stored":
            event = (event[0], hashlib.sha256(repr(event[3]).encode()).digest()[:16], *event[2:])
        super()._note(*event)


def hits(make_pool, make_plan, stored, *asked):
    """How many tokens of a block each namespace finds that was cached in the first."""
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, stored)
    return [pool.prefix.match(A + B, space) for space in asked]


@row(broken(prelude=PYTHON_HASHES), model=False)
def test_i1_event_keys_do_not_depend_on_the_hash_seed_of_python(parts):
    """CVE-2025-25183: keys built on Python's hash(), where hash(None) is a constant."""
    program = (
        "from kvpool.testing.model import ModelPlan as Plan, ModelPool as Pool\n"
        if os.environ.get("KVPOOL_CORE") == "model"
        else "from kvpool import Plan, Pool\n"
    ) + (
        parts.prelude + "pool = Pool(8, 2, prefix_cache=True, events=8); plan = Plan(pool, 1, 4)\n"
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


@row(broken(namespace=tokens_only))
def test_i3_tenants_with_one_salt_hit_and_with_two_do_not(make_pool, make_plan, parts):
    """CVE-2025-46570: the time to the first token told one tenant what another had asked."""
    mine, yours = (parts.namespace(salt=salt) for salt in ("mine", "yours"))
    assert hits(make_pool, make_plan, mine, mine, yours, b"") == [4, 0, 0]


@row(HashIsTheBlock)
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


@row(HashIsTheBlock)
def test_i5_colliding_hash_is_no_proof(make_pool, make_plan):
    """openvino.genai#3722, vllm PR54727: equal hashes were taken for equal tokens."""
    prompts = [[i] * 4 + [i + 1] * 4 for i in range(20)]
    for bits in (0, 1, 3):
        pool = make_pool(64, 4, prefix_cache=True, _hash_bits=bits)
        tables = [pool.table(serve(make_plan, pool, prompt)).tolist() for prompt in prompts]
        for i, prompt in enumerate(prompts):
            hits = pool.table(pool.prefix.pin(prompt)).tolist()
            assert hits == tables[i][: len(hits)]
            assert pool.prefix.match([i] * 4 + [i + 2] * 4 + [0]) in (0, 4)
            assert pool.prefix.match([i + 100] * 5) == 0


@row(broken(namespace=untagged))
def test_i6_adapter_and_salt_of_one_name_are_two(make_pool, make_plan, parts):
    """vllm#44701, sglang#24638: untagged in one tuple; the base model hit blocks of an adapter."""
    adapter, salt = parts.namespace(lora="a"), parts.namespace(salt="a")
    assert hits(make_pool, make_plan, adapter, adapter, salt, b"") == [4, 0, 0]


@row(broken(namespace=tokens_only))
def test_i7_adapter_with_new_weights_under_an_old_name_misses(make_pool, make_plan, parts):
    """vllm#30931: the name of an adapter was its key."""
    old, new = (parts.namespace(lora=hashlib.sha256(weights).digest()) for weights in (b"old", b"new"))
    assert hits(make_pool, make_plan, old, old, new) == [4, 0]


@row(KeysWithoutSalt)
def test_i8_keys_that_leave_the_pool_have_the_salt(make_pool, make_plan, parts):
    """The salt was honoured in memory, and dropped in the keys of the next tier."""
    keys = []
    for salt in ("mine", "yours", "mine"):
        pool = make_pool(prefix_cache=True, events=8)
        cache(make_plan, pool, A + B, parts.namespace(salt=salt))
        keys.append([event[1] for event in pool.prefix.events()])
    assert keys[0] == keys[2] and not set(keys[0]) & set(keys[1])


@row(broken(namespace=tokens_only))
def test_i9_model_and_format_are_in_the_key(make_pool, make_plan, parts):
    """sglang#33268, #24758: the key lacked the weights' identity and the KV dtype."""
    spaces = [parts.namespace(model=m, kv_dtype=d) for m in ("one", "two") for d in ("float16", "int8")]
    assert hits(make_pool, make_plan, spaces[0], *spaces) == [4, 0, 0, 0]


@row(broken(namespace=tokens_only))
def test_i10_image_of_another_shape_with_the_same_bytes_misses(make_pool, make_plan, parts):
    """Bytes without shape; 30 x 150 was 150 x 30. The digest is the caller's, of both."""
    pixels = np.zeros((30, 150), np.uint8)
    one, other = (parts.namespace(multimodal=[(0, digest(image))]) for image in (pixels, pixels.T.copy()))
    assert hits(make_pool, make_plan, one, one, other) == [4, 0]


@row(broken(namespace=cut_digests))
def test_i11_digests_are_compared_whole(make_pool, make_plan, parts):
    """LMCache#3301: image hashes were cut to 16 bits."""
    whole = hashlib.sha256(b"image").digest()
    near = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(32)]
    spaces = [parts.namespace(multimodal=[(0, digest)]) for digest in (whole, *near)]
    assert hits(make_pool, make_plan, spaces[0], *spaces) == [4] + [0] * 32


@row(broken(namespace=tokens_only))
def test_i12_equal_placeholder_tokens_of_two_images_miss(make_pool, make_plan, parts):
    """vllm PR49975, ATOM PR1358: placeholder ids are all equal, only the digest tells the images apart."""
    cat, dog = (parts.namespace(multimodal=[(0, digest)]) for digest in (b"cat", b"dog"))
    assert hits(make_pool, make_plan, cat, cat, dog, b"") == [4, 0, 0]


@row(broken(namespace=joined))
def test_i13_fields_that_join_to_one_text_are_told_apart(make_pool, make_plan, parts):
    """confidential-model-router PR386: ("org_1", "2345") and ("org_12345", "")."""
    one, other = parts.namespace(salt="org_1", lora="2345"), parts.namespace(salt="org_12345", lora="")
    assert hits(make_pool, make_plan, one, one, other) == [4, 0]
