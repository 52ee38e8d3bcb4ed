"""`PromptCache` beside a naive model that keeps whole prompts, on caches whose content says what it is."""

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")
np = pytest.importorskip("numpy")
cache_module = pytest.importorskip("mlx_lm.models.cache")

from kvpool.adapters import prompt_cache as subject  # noqa: E402
from kvpool.adapters import prompt_store  # noqa: E402
from kvpool.adapters.prompt_cache import PromptCache  # noqa: E402
from kvpool.adapters.prompt_store import store_layout  # noqa: E402
from kvpool.store import BlockLayout, DiskStore, Layout, MemoryStore, TieredStore  # noqa: E402
from proof import prompt_cache as proof  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ROW_NBYTES = 2 * 2 * proof.HEADS * proof.WIDTH * 4  # of a token of a dense cache


def computed(kind, tokens, seed=1):
    return proof.made(kind, tokens, random.Random(seed))


@pytest.mark.parametrize("kind", proof.KINDS)
def test_random_calls_on_caches_of_each_kind_have_no_finding(kind):
    assert proof.hunt(11, 200, kind) == ""


@pytest.mark.long
def test_random_calls_from_any_seed_have_no_finding():
    assert proof.hunt(random.Random().randrange(1 << 30), 5000) == ""


@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_threads_on_one_cache_hold_no_byte_above_the_budget(calls):
    assert proof.threads(1, calls) == ""


def a_stale_row(patch):
    patch.setattr(PromptCache, "_clear", lambda self, shelf, block: None)


def a_shared_object(patch):
    patch.setattr(subject, "copied", lambda cache, array: cache)


def a_tail_of_other_tokens(patch):
    patch.setattr(subject, "_common", lambda a, b: min(len(a), len(b)))


def a_namespace_lost(patch):
    fetch = PromptCache._fetch
    patch.setattr(PromptCache, "_fetch", lambda self, tokens, namespace, *more: fetch(self, tokens, b"", *more))


def a_budget_ignored(patch):
    room = PromptCache._make_room
    patch.setattr(PromptCache, "_make_room", lambda self, nbytes, *more: room(self, 0, *more))


def a_row_too_late(patch):
    rows = subject.rows_of
    patch.setattr(subject, "rows_of", lambda layout, leaves, begin, end: rows(layout, leaves, max(begin - 1, 0), end))


def a_fork_that_ignores_the_index(patch):
    equal = np.array_equal
    patch.setattr(subject.np, "array_equal", lambda a, b: len(a) != 16 and equal(a, b))


def a_prefix_inside_media(patch):
    patch.setattr(subject, "_outside", lambda length, spans: length)


def media_all_alike(patch):
    patch.setattr(PromptCache, "_atom", lambda self, name: 0)


def a_window_cut_wrong(patch):
    patch.setattr("kvpool.adapters.dense_caches.compact", lambda cache: cache)


def sequences_without_end(patch):
    patch.setattr(PromptCache, "_trim_sequences", lambda self, count: None)


def a_store_of_other_namespaces(patch):
    longest = prompt_store.PromptStore.longest
    patch.setattr(
        prompt_store.PromptStore,
        "longest",
        lambda self, known, begin, least, namespace: longest(self, known, begin, least, b"other"),
    )


def a_store_without_tails(patch):
    unpacked = prompt_store.PromptStore._unpacked
    patch.setattr(
        prompt_store.PromptStore,
        "_unpacked",
        lambda self, row, length: ([row * 0 for row in unpacked(self, row, length)[0]], unpacked(self, row, length)[1]),
    )


def a_store_never_asked(patch):
    patch.setattr(PromptCache, "_load", lambda *arguments: None)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (a_stale_row, "dense"),
        (a_shared_object, "state"),
        (a_tail_of_other_tokens, "dense"),
        (a_namespace_lost, "dense"),
        (a_row_too_late, "dense"),
        (a_budget_ignored, "dense"),
        (a_fork_that_ignores_the_index, "dense"),
        (a_prefix_inside_media, "dense"),
        (media_all_alike, "dense"),
        (sequences_without_end, "dense"),
        (a_store_of_other_namespaces, "dense"),
        (a_store_without_tails, "window"),
        (a_store_never_asked, "dense"),
        (a_window_cut_wrong, "chunk"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, fault, kind):
    fault(monkeypatch)
    assert proof.hunt(11, 4000, kind)


def test_threads_find_a_budget_that_is_ignored(monkeypatch):
    a_budget_ignored(monkeypatch)
    assert proof.threads(1, 300)


WRITES = """
import random, sys
from kvpool.adapters.prompt_cache import PromptCache
from kvpool.adapters.prompt_store import store_layout
from kvpool.store import DiskStore
from proof import prompt_cache as proof

for kind in proof.STORED:
    rng = random.Random(3)
    store = DiskStore(f"{sys.argv[1]}/{kind}", store_layout(proof.made(kind, [0] * 30, rng), "w"), 1 << 30)
    store.ready.wait(60)
    prompts = PromptCache(store=store)
    for model, length in ((("name", None), 75), (("name", None), 131), (("other", None), 90)):
        prompts.insert_cache(model, list(range(length)), proof.made(kind, list(range(length)), rng))
    assert store.drain()
    store.close()
"""


def test_prompts_outlive_the_process_in_a_directory_to_the_same_bits(tmp_path):
    subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], cwd=ROOT, check=True)
    for kind in proof.STORED:
        store = DiskStore(f"{tmp_path}/{kind}", store_layout(computed(kind, [0] * 30), "w"), 1 << 30)
        assert store.ready.wait(60)
        prompts, tokens = PromptCache(store=store), list(range(150))
        for model, length in ((("name", None), 131), (("other", None), 90), (("third", None), 0)):
            caches, rest = prompts.fetch_nearest_cache(model, tokens)
            found = length // 16 * 16 if kind in proof.CUT else length
            assert (kind, len(tokens) - len(rest)) == (kind, found)
            assert proof.fault_in(caches or [], kind, tokens[:found]) == ""
        store.close()


def test_the_example_of_a_loop_finds_its_prompts_after_a_restart(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "prompt_cache_loop.py"), str(tmp_path / "store")]
    cold, warm = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    (before, answers), (after, same) = (
        zip(*(line.split(" tokens known: ") for line in text.splitlines()), strict=True) for text in (cold, warm)
    )
    assert answers == same and len(answers) == 3
    assert before[0].startswith("0 of ")
    assert all(int(line.split()[0]) == (int(line.split()[2]) - 1) // 16 * 16 for line in after)


def test_a_store_of_another_layout_is_refused_or_not_used():
    layout = Layout((BlockLayout(16, 64, "other"),), "w")
    with pytest.raises(ValueError, match="not one of store_layout"):
        PromptCache(store=MemoryStore(layout, 1 << 20))
    store = MemoryStore(store_layout(computed("quantized", [1]), "w"), 1 << 20)
    prompts = PromptCache(store=store)
    with pytest.warns(UserWarning, match="are not stored"):
        prompts.insert(range(40), computed("dense", list(range(40))))
    assert prompts.fetch(range(41))[1] == 40 and store.stats()["memory"].stored == 0
    with pytest.raises(ValueError, match="Unknown is empty or unknown"):
        store_layout(computed("unknown", [1]), "w")


def test_prompts_are_stored_up_to_their_first_image():
    store = MemoryStore(store_layout(computed("dense", [1]), "w"), 1 << 20)
    tokens = list(range(100))
    PromptCache(store=store).insert(tokens, computed("dense", tokens), media=[(50, 60, "cat")])
    assert PromptCache(store=store).fetch(tokens)[1] == 48


def test_a_store_that_lost_blocks_gets_them_with_the_next_turn():
    store = MemoryStore(store_layout(computed("dense", [1]), "w"), 1 << 20)
    prompts, tokens = PromptCache(store=store), list(range(100))
    prompts.insert(tokens[:50], computed("dense", tokens[:50]))
    store._held.clear()
    prompts.insert(tokens, computed("dense", tokens))
    assert PromptCache(store=store).fetch(tokens)[1] == 96


def test_a_disk_that_refused_blocks_gets_them_with_the_next_turn(tmp_path):
    layout, tokens = store_layout(computed("dense", [1]), "w"), list(range(100))
    disk = DiskStore(str(tmp_path / "store"), layout, 1 << 26)
    store = TieredStore([MemoryStore(layout, 1 << 20), disk])
    prompts = PromptCache(store=store)
    assert disk.ready.wait(60)
    disk._paused_until = float("inf")
    prompts.insert(tokens[:50], computed("dense", tokens[:50]))
    disk._paused_until = 0.0
    prompts.insert(tokens, computed("dense", tokens))
    assert store.drain(60) and PromptCache(store=disk).fetch(tokens)[1] == 96
    store.close()


def test_a_prefix_never_ends_inside_media_and_needs_equal_media():
    prompts = PromptCache()
    tokens = list(range(10)) + [0] * 30 + list(range(10))
    prompts.insert(tokens, computed("dense", tokens), media=[(10, 40, "cat")])
    assert prompts.fetch(tokens[:30] + [7] * 20, media=[(10, 30, "cat")])[1] == 30
    assert prompts.fetch(tokens, media=[(10, 40, "dog")])[1] == 10
    assert prompts.fetch(tokens, media=[(10, 40, "cat")])[1] == 49
    assert prompts.fetch(tokens[:36], media=[])[1] == 10


def test_tokens_that_are_none_are_refused_and_nothing_changes():
    prompts = PromptCache()
    for tokens, error in (([1.5], TypeError), ([1 << 30], ValueError), ([1 << 40], ValueError)):
        for call in (prompts.fetch, lambda tokens: prompts.insert(tokens, computed("dense", [1]))):
            with pytest.raises(error, match="token"):
                call(tokens)
    assert (len(prompts), prompts.nbytes, prompts.fetch([])) == (0, 0, (None, 0))


def test_batches_of_one_row_are_kept_as_their_row():
    made = cache_module
    rows = {
        "full": [made.BatchKVCache.merge([computed("dense", list(range(40)))[0]])],
        "window": [made.BatchRotatingKVCache.merge([computed("window", list(range(40)))[1]])],
        "list": [made.CacheList(made.BatchKVCache.merge([computed("dense", list(range(40)))[0]]))],
    }
    for caches in rows.values():
        prompts = PromptCache()
        prompts.insert(range(40), caches)
        (found,), length = prompts.fetch(range(41))
        inner = found.caches[0] if isinstance(found, made.CacheList) else found
        assert length == 40 and type(inner) in (made.KVCache, made.RotatingKVCache) and inner.offset == 40


def test_chunked_caches_keep_no_more_than_a_chunk():
    cache = cache_module.ChunkedKVCache(24)
    rows = mx.array(proof.plane(list(range(100)), 0))
    cache.update_and_fetch(rows, rows)
    prompts = PromptCache()
    prompts.insert(range(100), [cache])
    (found,), length = prompts.fetch(range(101))
    assert (length, found.offset, found.start_position, found.keys.shape[2]) == (100, 100, 76, 24)
    assert prompts.nbytes == 24 * rows.nbytes // 100 * 2


def test_unknown_caches_are_kept_whole_and_found_where_they_end():
    prompts, tokens = PromptCache(), list(range(40))
    prompts.insert(tokens, [proof.Unknown(1)])
    assert prompts.fetch(tokens) == (None, 0)
    (found,), length = prompts.fetch([*tokens, 1])
    assert (found.digest, length) == (1, 40)
    found.digest = 2
    assert prompts.fetch([*tokens, 1])[0][0].digest == 1


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
    prompts = PromptCache(40 * ROW_NBYTES)
    tokens = list(range(100))
    prompts.insert(tokens, computed("dense", tokens))
    assert (prompts.fetch(tokens)[1], prompts.nbytes) == (32, 32 * ROW_NBYTES)


def test_checkpoints_keep_to_their_own_budget():
    prompts = PromptCache(checkpoint_bytes=3 * 8)
    for number in range(10):
        prompts.insert([number] * 20, computed("state", [number] * 20))
    assert [prompts.fetch([n] * 21)[1] for n in range(10)] == [0] * 7 + [20] * 3


def test_the_account_of_bytes_is_that_of_mlx():
    prompts = PromptCache()
    gc.collect()
    before = mx.get_active_memory()
    for start in range(8):
        cache, rows = cache_module.KVCache(), mx.ones((1, 8, 100, 64))
        cache.update_and_fetch(rows, rows)
        prompts.insert([start, *range(99)], [cache])
        prompts.fetch([start, *range(100)])
    del cache, rows
    gc.collect()
    held = mx.get_active_memory() - before
    assert prompts.nbytes == 8 * 100 * 2 * 8 * 64 * 4
    assert prompts.nbytes <= held <= 1.02 * prompts.nbytes


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text", "gpt_oss", "lfm2"])
def test_the_second_turn_of_a_hybrid_computes_what_is_new_to_the_same_bits(family):
    from kvpool.adapters.mlx_lm import tiny_families

    model = tiny_families.build(family, tiny_families.config_of(family))
    tiny_families.randomize(model)
    rng = random.Random(1)
    first = [rng.randrange(1, 60) for _ in range(75)]
    second = [*first, *(rng.randrange(1, 60) for _ in range(21))]
    caches = cache_module.make_prompt_cache(model)
    model(mx.array([first]), cache=caches)
    store = MemoryStore(store_layout(caches, "w"), 1 << 24)
    prompts = PromptCache(store=store)
    prompts.insert(first, caches)
    cold = model(mx.array([second[len(first) :]]), cache=caches)
    for each in (prompts, PromptCache(store=store)):  # the same process, and another one
        found, length = each.fetch(second)
        assert length == len(first)
        assert mx.array_equal(model(mx.array([second[length:]]), cache=found), cold)
