"""`PromptCache` beside a naive model that keeps whole prompts, on caches whose content says what it is."""

import random
import threading
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
np = pytest.importorskip("numpy")
cache_module = pytest.importorskip("mlx_lm.models.cache")

from kvpool.adapters import prompt_cache as subject  # noqa: E402
from kvpool.adapters.prompt_cache import PromptCache  # noqa: E402

HEADS, WIDTH = 2, 4
WINDOW = 24


def digests(tokens):
    """A number for each prefix, so that a row says which tokens came before it."""
    found, value = [], 1
    for token in tokens:
        value = (value * 1_000_003 + int(token) + 7) % 16_777_213
        found.append(float(value))
    return np.array(found, np.float32)


def planes(tokens, layer):
    keys = np.zeros((1, HEADS, len(tokens), WIDTH), np.float32)
    keys[...] = digests(tokens)[None, None, :, None]
    keys += np.arange(WIDTH, dtype=np.float32) + 10 * layer
    return mx.array(keys), mx.array(keys + 5)


def caches_of(kind):
    made = cache_module
    return {
        "dense": lambda: [made.KVCache(), made.KVCache()],
        "quantized": lambda: [made.QuantizedKVCache(group_size=32, bits=8)],
        "window": lambda: [made.KVCache(), made.RotatingKVCache(WINDOW, keep=4)],
        "chunk": lambda: [made.ChunkedKVCache(WINDOW), made.KVCache()],
        "state": lambda: [made.KVCache(), made.ArraysCache(2)],
        "list": lambda: [made.CacheList(made.KVCache(), made.ArraysCache(1)), made.KVCache()],
    }[kind]()


def leaves_of(caches):
    for cache in caches:
        yield from leaves_of(cache.caches) if type(cache) is cache_module.CacheList else [cache]


def feed(caches, tokens, begin):
    """Compute tokens[begin:] into the caches, as a model would."""
    for layer, cache in enumerate(leaves_of(caches)):
        if type(cache) is cache_module.ArraysCache:
            for place in range(len(cache.cache)):
                cache[place] = mx.array(digests(tokens)[-1:] + place).reshape(1, 1)
            continue
        keys, values = planes(tokens, layer)
        keys, values = keys[:, :, begin:], values[:, :, begin:]
        if type(cache) is cache_module.QuantizedKVCache:
            keys, values = mx.tile(keys, (1, 1, 1, 8)), mx.tile(values, (1, 1, 1, 8))
        if type(cache) is cache_module.ChunkedKVCache:
            cache.maybe_trim_front()
        cache.update_and_fetch(keys, values)


def contents(caches):
    """What a model would read, in temporal order."""
    found = []
    for cache in leaves_of(caches):
        if type(cache) is cache_module.ArraysCache:
            found += [np.array(x) for x in cache.cache]
        elif type(cache) is cache_module.RotatingKVCache:
            for plane in (cache.keys, cache.values):
                held = np.array(cache._temporal_order(plane))
                first = max(cache.keep, held.shape[2] - WINDOW + cache.keep)
                found.append(np.concatenate([held[:, :, : cache.keep], held[:, :, first:]], axis=2))
        elif type(cache) is cache_module.ChunkedKVCache:
            found += [np.array(x)[:, :, -min(cache.offset, WINDOW) :] for x in cache.keys_and_values()]
        else:
            for plane in cache.keys_and_values():
                found += [np.array(x) for x in (plane if isinstance(plane, (tuple, list)) else [plane])]
    return found


def computed(kind, tokens):
    caches = caches_of(kind)
    feed(caches, tokens, 0)
    return caches


class Naive:
    """Keeps every prompt that was inserted. Nothing leaves."""

    def __init__(self, can_cut):
        self.can_cut = can_cut
        self.prompts: list[tuple[bytes, tuple[int, ...]]] = []

    def longest(self, tokens, namespace):
        best = 0
        for where, prompt in self.prompts:
            common = 0
            while common < min(len(prompt), len(tokens) - 1) and prompt[common] == tokens[common]:
                common += 1
            if where == namespace and (self.can_cut or common == len(prompt)):
                best = max(best, common)
        return best


def run(kind, seed, rounds, prompts: Any = None, max_bytes=1 << 40):
    """Random conversations; returns the first finding, or None."""
    rng = random.Random(seed)
    prompts = prompts or PromptCache(max_bytes)
    naive, known = Naive(kind in ("dense", "quantized")), [[]]
    for number in range(rounds):
        base = rng.choice(known)
        base = base[: rng.choice([len(base), rng.randint(0, len(base))])][:120]
        tokens = base + [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        namespace = rng.choice([b"", b"other"])
        caches, length = prompts.fetch(tokens, namespace)
        least = naive.longest(tokens, namespace)
        if max_bytes == 1 << 40 and length != least:
            return f"seed {seed}, call {number}: {length} tokens found, {least} are known"
        if length > least:
            return f"seed {seed}, call {number}: {length} tokens found, only {least} were ever inserted"
        cold = computed(kind, tokens[:length]) if length else []
        for ours, theirs in zip(contents(caches or []), contents(cold), strict=True):
            if not np.array_equal(ours, theirs):
                return f"seed {seed}, call {number}: a hit of {length} tokens has other content"
        caches = caches or caches_of(kind)
        feed(caches, tokens, length)
        if prompts.nbytes > max_bytes:
            return f"seed {seed}, call {number}: {prompts.nbytes} bytes, the limit is {max_bytes}"
        prompts.insert(tokens, caches, namespace)
        naive.prompts.append((namespace, tuple(tokens)))
        known.append(tokens)
        for shelf in prompts._shelves.values():
            held = sum(row.nbytes for row in shelf.rows.values())
            if shelf.pool.num_blocks - shelf.pool.blocks.num_blank != len(shelf.rows) or held > prompts.nbytes:
                return f"seed {seed}, call {number}: the pool has other blocks than the cache"
    for shelf in prompts._shelves.values():
        shelf.pool.check()
    return None


KINDS = ("dense", "quantized", "window", "chunk", "state", "list")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_without_a_budget_are_found_at_every_known_length(kind):
    assert run(kind, 1, 60) is None


@pytest.mark.parametrize("max_bytes", [6_000, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_over_the_budget_leave_and_never_lie(kind, max_bytes):
    assert [run(kind, seed, 60, max_bytes=max_bytes) for seed in (2, 1017, 1027)] == [None] * 3


def a_stale_row(monkeypatch):
    monkeypatch.setattr(subject.PromptCache, "_clear", lambda self, shelf, block: None)


def a_shared_object(monkeypatch):
    monkeypatch.setattr(subject, "_copied", lambda cache, array: cache)


def a_tail_of_other_tokens(monkeypatch):
    monkeypatch.setattr(subject, "_common", lambda a, b: min(len(a), len(b)))


def a_namespace_lost(monkeypatch):
    fetch = subject.PromptCache.fetch
    monkeypatch.setattr(subject.PromptCache, "fetch", lambda self, tokens, namespace=b"": fetch(self, tokens))


def a_budget_ignored(monkeypatch):
    room = subject.PromptCache._make_room
    monkeypatch.setattr(subject.PromptCache, "_make_room", lambda self, nbytes, *more: room(self, 0, *more))


def a_row_too_late(monkeypatch):
    rows = subject._rows
    late = lambda layout, leaves, begin, end: rows(layout, leaves, max(begin - 1, 0), end)  # noqa: E731
    monkeypatch.setattr(subject, "_rows", late)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (a_stale_row, "dense"),
        (a_shared_object, "state"),
        (a_tail_of_other_tokens, "dense"),
        (a_namespace_lost, "dense"),
        (a_row_too_late, "dense"),
        (a_budget_ignored, "dense"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, fault, kind):
    fault(monkeypatch)
    try:
        findings = [run(kind, 3, 60), run(kind, 4, 60, max_bytes=20_000)]
    except (KeyError, IndexError, RuntimeError, ValueError):
        return
    assert any(findings)


def test_a_prefix_never_ends_inside_media_and_needs_equal_media():
    prompts = PromptCache()
    tokens = list(range(10)) + [0] * 30 + list(range(10))
    prompts.insert(tokens, computed("dense", tokens), media=[(10, 40, "cat")])
    assert prompts.fetch(tokens[:30] + [7] * 20, media=[(10, 30, "cat")])[1] == 30
    assert prompts.fetch(tokens, media=[(10, 40, "dog")])[1] == 10
    assert prompts.fetch(tokens, media=[(10, 40, "cat")])[1] == 49
    assert prompts.fetch(tokens[:36], media=[(10, 40, "cat")][:0])[1] == 10


def test_what_is_handed_out_belongs_to_the_caller():
    tokens = list(range(40))
    for kind in ("dense", "state"):
        prompts = PromptCache()
        prompts.insert(tokens, computed(kind, tokens))
        for end in (1, 2):
            caches, length = prompts.fetch([*tokens, end])
            assert length == 40
            for ours, cold in zip(contents(caches), contents(computed(kind, tokens)), strict=True):
                assert np.array_equal(ours, cold)
            for cache in caches:
                for array in cache.cache if type(cache) is cache_module.ArraysCache else (cache.keys, cache.values):
                    array[...] = 0


def test_threads_on_one_cache_get_their_own_content():
    prompts, findings = PromptCache(100_000), []
    threads = [threading.Thread(target=lambda s=s: findings.append(talk(prompts, s))) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert findings == [None] * 4


def talk(prompts, seed, rounds=30):
    rng = random.Random(seed)
    tokens: list[int] = []
    for _ in range(rounds):
        tokens = (tokens if len(tokens) < 300 else [])[:] + [rng.randrange(3) for _ in range(20)]
        caches, length = prompts.fetch(tokens)
        caches = caches or caches_of("dense")
        feed(caches, tokens, length)
        for ours, cold in zip(contents(caches), contents(computed("dense", tokens)), strict=True):
            if not np.array_equal(ours, cold):
                return f"seed {seed}: other content at {length} of {len(tokens)}"
        prompts.insert(tokens, caches)
        if prompts.nbytes > prompts.max_bytes:
            return f"seed {seed}: {prompts.nbytes} bytes, the limit is {prompts.max_bytes}"
    return None


class Unknown:
    """A cache of a class that nobody knows."""

    def __init__(self, name, nbytes=10):
        self.name, self.nbytes = name, nbytes

    def is_trimmable(self):
        return False


def test_unknown_caches_are_kept_whole_and_found_where_they_end():
    prompts = PromptCache()
    tokens = list(range(40))
    prompts.insert(tokens, [Unknown("all")])
    assert prompts.fetch(tokens) == (None, 0)
    (found,), length = prompts.fetch([*tokens, 1])
    assert (found.name, length) == ("all", 40)
    found.name = "changed"
    assert prompts.fetch([*tokens, 1])[0][0].name == "all"


def test_the_oldest_sequence_of_the_type_with_most_leaves_first():
    prompts = PromptCache(max_size=2)
    for number, cache_type in enumerate(("user", "assistant", "assistant")):
        prompts.insert_cache("model", [number] * 20, computed("dense", [number] * 20), cache_type=cache_type)
    assert [prompts.fetch_nearest_cache("model", [n] * 20)[1] for n in range(3)] == [[], [1] * 20, []]
    assert {kind: each["n_sequences"] for kind, each in prompts.stats_by_type().items()} == {
        "assistant": 1,
        "user": 1,
        "system": 0,
    }
    assert sum(each["n_bytes"] for each in prompts.stats_by_type().values()) == prompts.nbytes
    prompts.trim_to(n_bytes=0)
    assert (len(prompts), prompts.nbytes) == (0, 0)


def test_a_prompt_beyond_the_budget_keeps_its_beginning():
    row_nbytes = 2 * 2 * HEADS * WIDTH * 4
    prompts = PromptCache(40 * row_nbytes)
    tokens = list(range(100))
    prompts.insert(tokens, computed("dense", tokens))
    assert (prompts.fetch(tokens)[1], prompts.nbytes) == (32, 32 * row_nbytes)


def test_checkpoints_keep_to_their_own_budget():
    prompts = PromptCache(checkpoint_bytes=3 * 8)
    for number in range(10):
        tokens = [number] * 20
        prompts.insert(tokens, computed("state", tokens))
    assert [prompts.fetch([n] * 21)[1] for n in range(10)] == [0] * 7 + [20] * 3


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text", "gpt_oss", "lfm2"])
def test_the_second_turn_of_a_hybrid_computes_what_is_new_to_the_same_bits(family):
    from kvpool.adapters.mlx_lm import tiny_families

    model = tiny_families.build(family, tiny_families.config_of(family))
    tiny_families.randomize(model)
    rng = random.Random(1)
    first = [rng.randrange(1, 60) for _ in range(75)]
    second = [*first, *(rng.randrange(1, 60) for _ in range(21))]
    caches, prompts = cache_module.make_prompt_cache(model), PromptCache()
    model(mx.array([first]), cache=caches)
    prompts.insert(first, caches)
    found, length = prompts.fetch(second)
    assert length == len(first)
    warm = model(mx.array([second[length:]]), cache=found)
    assert mx.array_equal(warm, model(mx.array([second[length:]]), cache=caches))
