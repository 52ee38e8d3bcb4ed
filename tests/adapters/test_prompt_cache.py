"""`PromptCache` beside a naive model that keeps whole prompts, on caches whose content says what it is."""

import gc
import hashlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")
np = pytest.importorskip("numpy")
programs = pytest.importorskip("prompt_programs")  # needs the package of the caches
cache_module = programs.mlx_caches

import kvpool  # noqa: E402
from kvpool.adapters import prompt_cache as subject  # noqa: E402
from kvpool.adapters import prompt_store  # noqa: E402
from kvpool.adapters.prompt_cache import INDEX_NBYTES, PromptCache, register_cache  # noqa: E402
from kvpool.adapters.prompt_store import store_layout  # noqa: E402
from kvpool.store import BlockLayout, DiskStore, Layout, MemoryStore, TieredStore  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ROW_NBYTES = 2 * 2 * programs.HEADS * programs.WIDTH * 4  # of a token of a dense cache


def computed(kind, tokens, seed=1):
    return programs.made(kind, tokens, random.Random(seed))


def test_random_calls_on_caches_of_each_kind_have_no_finding():
    """A test of its own for each kind would run in a part of the environments of `tests.engines` only."""
    for kind in programs.KINDS:
        assert programs.hunt(11, 1000 if kind in programs.BOUNDED else 150, kind) == "", kind


@pytest.mark.parametrize(
    "calls", [pytest.param(5_000, marks=pytest.mark.long), pytest.param(200_000, marks=pytest.mark.slow)]
)
def test_random_calls_from_any_seed_have_no_finding(calls):
    assert programs.hunt(random.Random().randrange(1 << 30), calls) == ""


@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_threads_on_one_cache_hold_no_byte_above_the_budget(calls):
    assert programs.threads(1, calls) == ""


def test_random_calls_find_an_object_that_is_shared(monkeypatch):
    monkeypatch.setattr(subject, "copied", lambda cache, array, role: cache)
    assert "other content" in programs.hunt(11, 4000, "unknown")


def test_threads_find_a_budget_that_is_ignored(monkeypatch):
    room = PromptCache._make_room
    monkeypatch.setattr(PromptCache, "_make_room", lambda self, nbytes, *more: room(self, 0, *more))
    assert "the limit" in programs.threads(1, 300)


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_arrays_that_nobody_had_computed_are_used_by_other_threads():
    """A class that nobody knows, two rows of a batch, rows of a class of its own: each computes its arrays late."""
    for cache in (programs.Unknown(1), cache_module.ArraysCache(1), cache_module.ConcatenateKVCache()):
        prompts = PromptCache()

        def insert(cache=cache, prompts=prompts):
            rows = (mx.random.normal((2, 2, 20, 32)) + 1).astype(mx.bfloat16)
            if isinstance(cache, cache_module.ConcatenateKVCache):
                cache.update_and_fetch(rows[:1], rows[:1])
            else:
                vars(cache)["cache"] = [rows]
            return prompts.insert(range(20), [cache])

        assert in_a_thread(insert)
        (found,), length = in_a_thread(lambda prompts=prompts: prompts.fetch(range(21)))
        assert length == 20
        in_a_thread(lambda found=found: mx.eval(vars(found)))


@pytest.mark.parametrize("kind", programs.STORED)
def test_a_restart_finds_the_prompts_of_each_model_to_the_same_bits(kind):
    store, tokens = MemoryStore(store_layout(computed(kind, [0] * 30), "w"), 1 << 30), list(range(150))
    prompts, again = PromptCache(store=store), PromptCache(store=store)
    for model, length in ((("name", None), 75), (("name", None), 131), (("other", None), 90)):
        prompts.insert_cache(model, tokens[:length], computed(kind, tokens[:length]))
    for model, length in ((("name", None), 131), (("other", None), 90), (("third", None), 0)):
        caches, rest = again.fetch_nearest_cache(model, tokens)
        assert len(tokens) - len(rest) == (length // 16 * 16 if kind in programs.CUT else length)
        assert programs.fault_in(caches or [], kind, tokens[: len(tokens) - len(rest)]) == ""
    assert again._namespace("name") == kvpool.namespace(model="'name'")  # the same in another process


def test_the_example_of_a_loop_finds_its_prompts_after_a_restart(tmp_path):
    pytest.importorskip("mlx_lm.tokenizer_utils")
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


def test_a_store_of_states_of_another_release_of_mlx_lm_is_refused(tmp_path, monkeypatch):
    caches = computed("window", list(range(40)))
    DiskStore(str(tmp_path / "store"), store_layout(caches, "w"), 1 << 24).close()
    monkeypatch.setattr(prompt_store, "_release", lambda kind: "other 99.0")
    with pytest.raises(ValueError, match=r"another model or layout \(.*ends of mlx_\w+ [\d.]+: .*\(.*other 99.0: "):
        DiskStore(str(tmp_path / "store"), store_layout(caches, "w"), 1 << 24)


def test_records_of_states_have_names_of_their_tokens():
    store = prompt_store.PromptStore(MemoryStore(store_layout(computed("state", list(range(40))), "w"), 1 << 20))
    known = np.random.default_rng(1).integers(0, 9, 70).astype(np.int32)
    keys, lengths = prompt_store.prefix_keys(known, 16, b"tenant"), list(range(70, 0, -1))
    names = store._names(known, lengths, keys)
    for number, length in enumerate(lengths):
        start = (length - 1) // 16 * 16
        filled = known[start:length].tolist() + [2**31 - 1] * (start + 16 - length)
        assert names.tokens[number].tolist() == filled
        data = keys[start // 16].tobytes() + np.array(filled, "<i4").tobytes()
        assert names.keys[number].tobytes() == hashlib.sha256(data).digest()[:16]
        assert names.parents[number].tobytes() == keys[start // 16].tobytes()
    assert names.group == 1 and names.namespace == keys[0].tobytes()


@pytest.mark.parametrize("start", [1, 16, 47, 48, 50])
def test_a_restart_finds_all_whole_blocks_in_front_of_an_image(start):
    store = MemoryStore(store_layout(computed("dense", [1]), "w"), 1 << 20)
    tokens = list(range(start)) + [0] * 20 + [1] * 5
    images = [tokens, tokens[:start] + [-5] * 20 + [1] * 5]  # as a span, as negative numbers
    for given, media in zip(images, ([(start, start + 20, "cat")], ()), strict=True):
        PromptCache(store=store).insert(given, computed("dense", tokens), media=media)
        assert PromptCache(store=store).fetch(given, media=media)[1] == start // 16 * 16


def test_fetch_keeps_no_names_of_media():
    prompts = PromptCache()
    prompts.insert(range(20), computed("dense", list(range(20))))
    for number in range(100):
        assert prompts.fetch(range(30), media=[(8, 24, number)])[1] == 8
        assert prompts.fetch([*range(10), -1 - number, -1 - number, 3])[1] == 10
    assert not prompts._atoms
    prompts.insert([2**30 - 1] * 20, computed("dense", [2**30 - 1] * 20))  # the largest token
    assert prompts.fetch([1] * 20, media=[(0, 19, "cat")])[1] == 0


def test_the_oldest_of_many_media_are_forgotten_and_never_taken_for_others(monkeypatch):
    monkeypatch.setattr(subject, "_MAX_MEDIA", 3)
    prompts = PromptCache()
    for number in range(5):
        prompts.insert([1] * 40, computed("dense", [number] * 40), media=[(0, 20, number)])
    for number, length in ((0, 0), (1, 0), (2, 39), (3, 39), (4, 39)):
        caches, found = prompts.fetch([1] * 40, media=[(0, 20, number)])
        assert found == length and programs.fault_in(caches or [], "dense", [number] * length) == ""
    assert len(prompts._atoms) == 3


@pytest.mark.parametrize("length", [40, 48])
@pytest.mark.parametrize("kind", ["state", "window"])
def test_a_prompt_that_is_used_in_memory_stays_in_the_store(kind, length):
    layout = store_layout(computed(kind, [0] * 30), "w")
    store = MemoryStore(layout, 40 * max(group.nbytes for group in layout.groups))
    prompts, hot = PromptCache(store=store), [1] * length
    prompts.insert(hot, computed(kind, hot))
    for number in range(60):
        assert prompts.fetch([*hot, 2])[1] == length
        prompts.insert([3 + number] * 40, computed(kind, [3 + number] * 40))
    assert PromptCache(store=store).fetch([3] * 41)[1] == 0
    caches, found = PromptCache(store=store).fetch([*hot, 2])
    assert found == length and programs.fault_in(caches, kind, hot) == ""


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


def test_spans_side_by_side_are_not_one_span_and_other_spans_are_other_media():
    prompts, tokens = PromptCache(), list(range(11)) + [0] * 30 + list(range(10))
    prompts.insert(tokens, computed("dense", tokens), media=[(11, 26, "cat"), (26, 41, "cat")])
    assert prompts.fetch(tokens, media=[(11, 41, "cat")])[1] == prompts.fetch(tokens[:36])[1] == 11
    assert prompts.fetch(tokens, media=[(11, 26, "cat"), (26, 41, "dog")])[1] == 26


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


@pytest.mark.parametrize("make", [lambda: cache_module.RotatingKVCache(24), lambda: cache_module.ChunkedKVCache(24)])
def test_caches_of_two_lengths_or_of_more_tokens_are_not_kept_and_the_log_says_why(make, caplog):
    prompts, tokens = PromptCache(), list(range(40))
    turned = make()
    for start in range(0, 40, 8):
        rows = mx.array(programs.plane(tokens, 0))[:, :, start : start + 8]
        turned.update_and_fetch(rows, rows)
    turned.start_position = max(0, getattr(turned, "start_position", 0))
    if isinstance(turned, cache_module.ChunkedKVCache):
        turned.maybe_trim_front()
    prompts.insert(tokens[:30], [turned])
    prompts.insert(tokens, [turned, *computed("dense", tokens[:39])])
    prompts.insert(tokens, [*computed("dense", tokens), *computed("dense", tokens[:38])])
    assert (prompts.fetch([*tokens, 1]), len(prompts)) == ((None, 0), 0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "[insert] caches of [40] tokens, 30 tokens given",
        "[insert] caches of [39, 40] tokens, 40 tokens given",
        "[insert] caches of [38, 40] tokens, 40 tokens given",
    ]


def full(layers=2, heads=2, width=64):
    """Caches of 40 tokens."""
    caches, rows = [cache_module.KVCache() for _ in range(layers)], mx.ones((1, heads, 40, width))
    for cache in caches:
        cache.update_and_fetch(rows, rows)
    return caches


@pytest.mark.parametrize("other", [full(layers=3), full(heads=4), full(width=128), [cache_module.CacheList(*full())]])
def test_caches_of_two_models_in_one_namespace_are_not_found_and_the_log_says_it_once(other, caplog):
    prompts, tokens, own = PromptCache(), list(range(40)), kvpool.namespace(model="own")
    prompts.insert(tokens, full())
    prompts.insert([7] * 40, other, own)
    assert prompts.fetch([*tokens, 1])[1] == prompts.fetch([7] * 41, own)[1] == 40
    prompts.insert([8] * 40, other)
    for asked in ([*tokens, 1], [8] * 41):
        assert prompts.fetch(asked) == (None, 0)
    (record,) = caplog.records
    assert record.message.startswith("[fetch] a namespace has caches of two models")
    prompts.trim_to(n_sequences=0)
    prompts.insert([8] * 40, other)
    assert prompts.fetch([8] * 41)[1] == 40


def test_caches_of_one_model_are_found_in_whatever_form_they_are():
    """A window before and after it turned, dense and quantized rows, other dtypes, caches that are still empty."""
    prompts, tokens = PromptCache(), list(range(60))
    for length in (20, 60):
        prompts.insert(tokens[:length], computed("window", tokens[:length]))
    assert [prompts.fetch(each)[1] for each in (tokens[:30], [*tokens, 1])] == [20, 60]
    prompts = PromptCache()
    wide, narrow, packed = full(), full(), [cache.to_quantized(32, 8) for cache in full()]
    for cache in narrow:
        cache.keys, cache.values = (plane.astype(mx.float16) for plane in (cache.keys, cache.values))
    for number, caches in enumerate((wide, packed, narrow, [wide[0], cache_module.KVCache()])):
        prompts.insert([number] * 40, caches)
    assert [prompts.fetch([number] * 41)[1] for number in range(4)] == [40] * 4


def fails(*arguments):
    raise MemoryError


def one_row(*arguments):
    yield mx.zeros(16)
    fails()


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(subject.CacheLayout, "rows_of", one_row), (subject, "nbytes_of", fails), (subject, "copied", fails)],
)
def test_an_insertion_that_fails_leaves_everything_as_it_was(monkeypatch, owner, name, fault):
    prompts, tokens = PromptCache(), list(range(75))
    prompts.insert(tokens[:40], computed("state", tokens[:40]))
    pool = prompts._index.pool

    def state():
        stats = pool.stats()
        return len(prompts), prompts.nbytes, stats.sequences, stats.used, stats.blank, len(programs.rows_of(prompts))

    before = state()
    for more in (tokens, tokens[50:]):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(owner, name, fault)
            prompts.insert(more, computed("state", more))
        assert state() == before
    pool.check()
    assert prompts.fetch([*tokens, 7])[1] == 40
    prompts.insert(tokens, computed("state", tokens))
    caches, length = prompts.fetch([*tokens, 7])
    assert length == 75 and programs.fault_in(caches, "state", tokens) == ""
    assert programs.held_nbytes(prompts) == prompts.nbytes


@pytest.mark.parametrize("kind", ["KVCache", "RotatingKVCache", "ChunkedKVCache"])
def test_empty_caches_are_not_inserted(kind):
    prompts = PromptCache()
    made = getattr(cache_module, kind)
    prompts.insert(range(20), [made() if kind == "KVCache" else made(64), cache_module.ArraysCache(1)])
    prompts.insert(range(20), [made() if kind == "KVCache" else made(64)])
    assert (len(prompts), prompts.fetch(range(21))) == (0, (None, 0))


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
    prompts = PromptCache(40 * ROW_NBYTES + 3 * INDEX_NBYTES)
    tokens = list(range(100))
    prompts.insert(tokens, computed("dense", tokens))
    assert (prompts.fetch(tokens)[1], prompts.nbytes) == (32, 32 * ROW_NBYTES + 3 * INDEX_NBYTES)
    for small in (PromptCache(15 * ROW_NBYTES), PromptCache(0)):  # less than a block
        small.insert(tokens, computed("dense", tokens))
        assert (small.fetch(tokens), small.nbytes, len(small)) == ((None, 0), 0, 0)


@pytest.mark.parametrize(("kind", "found"), [("dense", 1264), ("state", 0)])
def test_a_prompt_longer_than_the_index_keeps_its_beginning_or_nothing(kind, found):
    """4 times the blocks that the budget has room for, and 64: 6,144 tokens, and 7,920."""
    prompts, tokens = PromptCache(80 * (16 * ROW_NBYTES + INDEX_NBYTES)), list(range(100)) * 90
    prompts.insert(tokens[:20], computed(kind, tokens[:20]))
    cache, rows = cache_module.KVCache(), mx.ones((1, programs.HEADS, 9000, programs.WIDTH), mx.uint32)
    cache.update_and_fetch(rows, rows)
    caches = [cache, cache] if kind == "dense" else [cache, computed("state", tokens[:20])[1]]
    assert (prompts.insert(tokens, caches), prompts.fetch(np.array(tokens[1:]))) == (found > 0, (None, 0))
    assert prompts.fetch([*tokens, 1])[1] == (found or 20)
    assert prompts.wanted(tokens) == ([16, 2048, 4096, 8192, 8976] if kind == "state" else [])


@pytest.mark.parametrize("kind", ["dense", "state"])
def test_a_smaller_budget_gives_memory_back_and_keeps_what_was_used_last(kind):
    prompts, long = PromptCache(1 << 24), [list(range(n, n + 150)) for n in (0, 1000, 2000)]
    for tokens in long:
        prompts.insert(tokens, computed(kind, tokens))
    gc.collect()
    full, before = prompts.nbytes, mx.get_active_memory()
    prompts.fetch([*long[0], 7])
    prompts.resize(full // 2)
    gc.collect()
    assert full // 4 < prompts.nbytes == programs.held_nbytes(prompts) <= full // 2 == prompts.max_bytes
    assert before - mx.get_active_memory() >= (full - prompts.nbytes) // 4  # the rest is the index
    caches, length = prompts.fetch([*long[0], 7])
    assert length == 150 and programs.fault_in(caches, kind, long[0]) == ""
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="resize"):
            prompts.resize(wrong)
    assert prompts.max_bytes == full // 2
    prompts.resize(1 << 24)
    for tokens in long:
        prompts.insert(tokens, computed(kind, tokens))
    assert prompts.nbytes == full and [prompts.fetch([*tokens, 7])[1] for tokens in long] == [150] * 3


def test_index_grows_with_what_is_inserted_and_with_its_budget():
    prompts, tokens, cache = PromptCache(1 << 20), list(range(40_000)), cache_module.KVCache()
    assert PromptCache()._index.pool.num_blocks <= 1024  # else the first insertion would take long
    cache.update_and_fetch(*[mx.arange(40_000, dtype=mx.uint32).reshape(1, 1, -1, 1)] * 2)
    prompts.resize(0)
    assert not prompts.insert(tokens, [cache]) and prompts.nbytes == 0
    prompts.resize(1 << 30)
    prompts.insert(tokens, [cache])
    (found,), length = prompts.fetch([*tokens, 1])
    assert length == 40_000 and mx.array_equal(found.keys, cache.keys[..., :40_000, :])


@pytest.mark.parametrize(("more", "limit"), [([7, *range(100)], 4000), (list(range(100)), 100)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_budget_that_shrinks_while_an_insertion_copies_holds_when_it_ends(monkeypatch, more, limit, fails):
    """`resize` cannot evict the block that the second one goes on from."""
    prompts, tokens, rows_of = PromptCache(1 << 24), list(range(20)), subject.CacheLayout.rows_of
    prompts.insert(tokens, computed("dense", tokens))

    def shrinks(*arguments):
        prompts.resize(limit)
        if fails:
            raise MemoryError
        return rows_of(*arguments)

    monkeypatch.setattr(subject.CacheLayout, "rows_of", shrinks)
    with pytest.raises(MemoryError) if fails else nullcontext():
        assert not prompts.insert(more, computed("dense", more))
    assert prompts.nbytes == programs.held_nbytes(prompts) <= limit
    assert prompts._index.pool.stats().sequences == len(prompts)


def test_checkpoints_keep_to_their_own_budget():
    prompts = PromptCache(checkpoint_bytes=3 * 6)
    for number in range(10):
        prompts.insert([number] * 20, computed("state", [number] * 20))
    assert [prompts.fetch([n] * 21)[1] for n in range(10)] == [0] * 7 + [20] * 3


@pytest.mark.parametrize(("state_blocks", "step"), [(1, 1), (5, 1), (5, 64), (1, 256)])
def test_wanted_names_the_positions_at_which_a_pool_with_layer_groups_takes_checkpoints(state_blocks, step):
    """The pool is asked where it wants its checkpoints; a state here has the bytes of so many of its blocks."""
    rng = random.Random(state_blocks)
    groups = [kvpool.Group.full(), kvpool.Group.state(64, blocks=state_blocks)]
    pool = kvpool.Pool(4096, 16, in_order=True, prefix_cache=True, reserved_blocks=0, groups=groups)
    plan = kvpool.Plan(pool, 1, 4096, formats=())
    prompts, document = PromptCache(), [rng.randrange(50) for _ in range(1000)]
    caches = computed("dense", [1])[:1]
    state = cache_module.ArraysCache(1)
    for number in range(6):
        tokens = document[: rng.randint(300, 1000)] + [100 + number] * rng.randint(1, 90)
        handle = pool.open(tokens, reserve=False)
        hit, expected = pool.num_tokens(handle), []
        while (place := int(pool.prefix.wanted([handle])[0])) > 0:
            pool.step(plan, [handle], place - pool.num_tokens(handle))
            expected.append(place)
        pool.step(plan, [handle], len(tokens) - pool.num_tokens(handle))
        pool.prefix.commit(handle, tokens[hit:])
        pool.close(handle)
        wanted = prompts.wanted(tokens, hit, step)
        if number:  # before anything is inserted nobody knows the bytes of a state
            spaced = [place for place in expected if place >= step or place == expected[-1]]
            assert [place for place in wanted if place in expected] == wanted and set(spaced) <= set(wanted)
        for place in (*expected, len(tokens)):
            rows = mx.ones((1, 1, place, 2))
            caches[0].keys, caches[0].values, caches[0].offset = rows, rows, place
            state[0] = mx.ones((1, state_blocks * 16 * 4)) * place
            prompts.insert(tokens[:place], [*caches, state])


def test_nothing_is_wanted_where_all_caches_have_rows():
    prompts, tokens = PromptCache(), list(range(9000))
    assert prompts.wanted(tokens) == [2048, 4096, 8192, 8976]  # nobody knows the caches yet
    prompts.insert(tokens[:100], computed("dense", tokens[:100]))
    assert prompts.wanted(tokens) == []
    prompts.insert(tokens[:100], computed("state", tokens[:100]))
    assert prompts.wanted(tokens, 96, media=[(4000, 4300, "cat")]) == [2048, 4000, 8192, 8976]


@pytest.mark.parametrize("kind", ["dense", "window", "state", "list"])
def test_many_prompts_are_fetched_as_the_batches_that_their_own_merge_makes(kind):
    prompts, first, second = PromptCache(), list(range(60)), [3] * 35
    for tokens in (first, second):
        prompts.insert(tokens, computed(kind, tokens))
    asked = [[*first, 1], [*second, 2], [9] * 20, [*second, 3]]
    batches, lengths = prompts.fetch_many(asked)
    assert lengths == [60, 35, 0, 35]
    rows = [prompts.fetch(tokens)[0] for tokens in asked]
    full, state = cache_module.KVCache, cache_module.ArraysCache(2)
    rows[2] = {
        "dense": [full(), full()],
        "window": [full(), cache_module.RotatingKVCache(programs.WINDOW, keep=programs.KEEP)],
        "state": [full(), state],
        "list": [cache_module.CacheList(full(), state), full()],
    }[kind]
    expected = [type(caches[0]).merge(list(caches)) for caches in zip(*rows, strict=True)]

    def leaves(caches):
        return [leaf for cache in caches for leaf in (cache.caches if hasattr(cache, "caches") else [cache])]

    for got, wanted in zip(leaves(batches), leaves(expected), strict=True):
        assert type(got) is type(wanted)
        assert vars(got).keys() == vars(wanted).keys()
        for name, value in vars(wanted).items():
            other = getattr(got, name)
            if name in ("keys", "values"):
                at = [slice(pad, None) for pad in wanted.left_padding.tolist()]
                assert all(mx.array_equal(other[n, :, s], value[n, :, s]) for n, s in enumerate(at)), name
            elif isinstance(value, mx.array):
                assert mx.array_equal(other, value), name
            elif not isinstance(value, list):
                assert other == value, name
    assert prompts.fetch_many([[9] * 20, [8]]) == (None, [0, 0])


@pytest.mark.parametrize("kind", ["chunk", "quantized", "list"])
def test_many_prompts_of_a_class_without_batches_are_refused_before_a_copy(kind, monkeypatch):
    """The list has a chunk in it."""
    prompts, tokens = PromptCache(), list(range(40))
    caches = computed("chunk" if kind == "list" else kind, tokens)
    prompts.insert(tokens, [cache_module.CacheList(*caches)] if kind == "list" else caches)
    monkeypatch.setattr(subject.CacheLayout, "caches_of", fails)
    name = "QuantizedKVCache" if kind == "quantized" else "ChunkedKVCache"
    with pytest.raises(TypeError, match=rf"\[fetch_many\] {name} has no merge"):
        prompts.fetch_many([[*tokens, 1], [9] * 20])
    assert prompts.fetch_many([[9] * 20]) == (None, [0])


def test_what_is_taken_leaves_the_cache():
    prompts, tokens = PromptCache(), list(range(40))
    for kind in ("state", "dense"):
        prompts.insert(tokens, computed(kind, tokens))
        before = prompts.nbytes
        caches, length = prompts.fetch([*tokens, 1], take=True)
        assert length == 40 and programs.fault_in(caches, kind, tokens) == ""
        assert (len(prompts), prompts.fetch([*tokens, 1])[1]) == (0, 0 if kind == "state" else 32)
        assert programs.held_nbytes(prompts) == prompts.nbytes < before
        prompts.trim_to(n_bytes=0)


def test_what_was_inserted_beside_the_caches_comes_back_with_all_media_of_the_sequence():
    for kind in ("dense", "state"):
        prompts, tokens = PromptCache(), list(range(100))
        prompts.insert(tokens, computed(kind, tokens), media=[(20, 31, "cat")], extra={"rope_deltas": -7})
        hit = prompts.fetch([*tokens, 1], media=[(20, 31, "cat")])
        assert hit[1] == 100 and hit.extra == {"rope_deltas": -7}
        assert prompts.fetch([*tokens[:30], 1]).extra is None
        assert prompts.fetch([*tokens[:17], 1]).extra is None
        assert prompts.fetch([*tokens, 1]).extra is None  # the same tokens, and no image
        prompts.trim_to(n_bytes=0)
        assert not prompts._index.origins


def test_a_prompt_is_promoted_from_the_store_while_others_go_on():
    store = MemoryStore(store_layout(computed("state", [0]), "w"), 1 << 20)
    tokens = list(range(40))
    PromptCache(store=store).insert(tokens, computed("state", tokens))
    prompts = PromptCache(store=store)
    assert prompts.fetch([*tokens, 1], load=False) == (None, 0)
    coming = prompts.promote([*tokens, 1])
    assert coming.result(60) == 40 and coming.done()
    assert prompts.fetch([*tokens, 1], load=False)[1] == 40


def test_a_fetch_waits_for_no_copy_of_an_insertion(monkeypatch):
    """The insertion stops in the middle of its copies until the fetch has come back."""
    prompts, tokens = PromptCache(), list(range(5000))
    prompts.insert(tokens[:40], computed("dense", tokens[:40]))
    has_begun, may_end, rows_of = threading.Event(), threading.Event(), subject.CacheLayout.rows_of

    def slow(*arguments):
        has_begun.set()
        assert may_end.wait(60)
        yield from rows_of(*arguments)

    cache, rows = cache_module.KVCache(), mx.ones((1, programs.HEADS, 5000, programs.WIDTH), mx.uint32)
    mx.eval(cache.update_and_fetch(rows, rows))
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(subject.CacheLayout, "rows_of", slow)
        inserted = pool.submit(prompts.insert, tokens, [cache, cache])
        assert has_begun.wait(60)
        assert prompts.fetch(tokens[:50])[1] == 40
        patch.setattr(subject.CacheLayout, "rows_of", rows_of)
        prompts.insert(tokens[:3000], [cache, cache])  # another one inserts the same tokens
        may_end.set()
        inserted.result()
    assert prompts.fetch(tokens)[1] == 4999 and programs.held_nbytes(prompts) == prompts.nbytes
    prompts.trim_to(n_bytes=0)
    assert prompts.nbytes == 0 and prompts._index.pool.stats().sequences == 0


RESIDENT = """
import os, sys
import mlx.core as mx
from tests.helpers.prompt_programs import mlx_caches
from kvpool.adapters.prompt_cache import PromptCache

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

width = int(sys.argv[1])
cache, rows = mlx_caches.KVCache(), mx.ones((1, 1, 16_000, width))
cache.update_and_fetch(rows, rows)
prompts = PromptCache(256 << 20)
prompts.insert([0] * 16_000, [cache])
prompts.trim_to(n_bytes=0)
mx.clear_cache()
before, number = resident(), 0
while prompts.nbytes < 128 << 20:
    number += 1
    prompts.insert([number] * 16_000, [cache])
print((resident() - before) / prompts.nbytes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
@pytest.mark.parametrize("width", [1, 64])
def test_the_bytes_of_the_cache_and_of_its_index_are_those_of_the_process(width):
    """8 and 512 bytes a token: the index is most of a block, and a tenth of it."""
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(width)], cwd=ROOT, capture_output=True, text=True)
    assert 0.9 <= float(done.stdout) <= 1.1, (done.stdout, done.stderr)


@pytest.mark.parametrize("families", [("qwen3_5", "gemma4_text", "gpt_oss"), pytest.param((), marks=pytest.mark.long)])
def test_models_of_every_family_answer_as_without_the_cache_before_and_after_a_restart(families):
    """Prompts below and above the windows of the models. Where the same tokens are computed, the bits are the same."""
    pytest.importorskip("mlx_lm.tokenizer_utils")
    from benchmarks import tiny_families

    def answer(model, tokens, caches):
        logits = [model(mx.array([tokens]), cache=caches)[0, -1]]
        while len(logits) < 6:
            logits.append(model(mx.argmax(logits[-1])[None, None], cache=caches)[0, -1])
        return mx.stack(logits)

    wrong, rng = [], random.Random(1)
    for family in families or sorted(tiny_families.OWN):
        model = tiny_families.build(family, tiny_families.config_of(family))
        tiny_families.randomize(model)
        for length in (20, 150):
            first = [rng.randrange(1, 60) for _ in range(length)]
            second = [*first, *(rng.randrange(1, 60) for _ in range(13))]
            caches = cache_module.make_prompt_cache(model)
            mx.eval(model(mx.array([first]), cache=caches))
            store = MemoryStore(store_layout(caches, "w"), 1 << 24)
            prompts = PromptCache(store=store)
            prompts.insert(first, caches)
            expected = answer(model, second[length:], caches)
            for each, least in ((prompts, length), (PromptCache(store=store), length // 16 * 16)):
                found, known = each.fetch(second)
                logits = answer(model, second[known:], found)
                is_same = mx.array_equal(*(mx.argmax(one, axis=-1) for one in (logits, expected)))
                if known < least or not is_same or (known == length and not mx.array_equal(logits, expected)):
                    wrong.append((family, length, known))
    assert wrong == []


class Stranger:
    """A class that nobody knows: its rows could be cut, and its attributes do not say so."""

    def __init__(self, tokens):
        self.keys = self.values = mx.array(programs.plane(tokens, 0))
        self.offset, self.codec, self.max_size = len(tokens), "none", 1 << 20

    def is_trimmable(self):
        return True


def test_a_class_is_kept_as_it_was_registered(caplog):
    tokens, found = list(range(40)), {}
    for kind in (None, "rows", "state", "whole"):
        if kind:
            register_cache(Stranger, kind)
        prompts = PromptCache()
        prompts.insert(tokens, [Stranger(tokens)])
        found[kind] = [prompts.fetch([*tokens[:length], 99])[1] for length in (40, 25)]
        (cache,), _ = prompts.fetch([*tokens, 99])
        assert type(cache) is Stranger and cache.codec == "none" and mx.array_equal(cache.keys, Stranger(tokens).keys)
    assert found == {None: [40, 0], "rows": [40, 25], "state": [40, 0], "whole": [40, 0]}
    with pytest.raises(ValueError, match="it must be one of rows, state, whole, list"):
        register_cache(Stranger, "window")


def test_a_cache_of_any_attributes_comes_back_with_them():
    class Own(cache_module.KVCache):
        def __init__(self):
            super().__init__()
            self.kind = self.fields = "mine"

    prompts, tokens = PromptCache(), list(range(40))
    cache = Own()
    cache.update_and_fetch(mx.ones((1, 2, 40, 8)), mx.ones((1, 2, 40, 8)))
    assert prompts.insert(tokens, [cache])
    (found,), length = prompts.fetch([*tokens, 1])
    assert (type(found), found.kind, found.fields, length) == (Own, "mine", "mine", 40)


@pytest.mark.parametrize("cut", [np.s_[:, ::-1], np.s_[..., -1:], np.s_[0, :, ::3]])
def test_states_are_kept_and_stored_whatever_their_strides(cut):
    state, tokens = cache_module.ArraysCache(1), list(range(40))
    state[0] = mx.arange(96.0).reshape(1, 4, 24)[cut]
    store = MemoryStore(store_layout([state], "w"), 1 << 20)
    for prompts in (PromptCache(store=store), PromptCache(store=store)):
        prompts.insert(tokens, [state] * (not store.stats()["memory"].stored))
        (found,), length = prompts.fetch([*tokens, 1])
        assert length == 40 and mx.array_equal(found[0], state[0])


class Bare:
    """A class that nobody knows and that says nothing."""

    def __init__(self, count):
        self.held, self.codec = mx.ones((count,)), object()


def test_a_class_without_methods_is_kept_whole_and_counted_by_its_arrays():
    prompts = PromptCache(2000)
    assert [prompts.insert([count] * 20, [Bare(count)]) for count in (100, 300, 600)] == [True, True, False]
    assert (len(prompts), prompts.nbytes, prompts.fetch([300] * 21)[1]) == (2, 1600, 20)
    slots = type("Slots", (), {"__slots__": ("held",), "__init__": lambda self: setattr(self, "held", mx.ones((900,)))})
    assert not prompts.insert([1] * 20, [slots()])
    prompts = PromptCache()
    prompts.insert([1] * 20, [type("Own", (cache_module._BaseCache,), {})(), computed("unknown", [1])[0]])
    assert (len(prompts), prompts.nbytes) == (1, 100)


def test_tokens_of_any_shape_do_not_disturb_insertions_at_the_same_time():
    prompts, tokens = PromptCache(), list(range(40))
    with prompts._announced(np.array([tokens]) + 1), prompts._announced(np.array([tokens[:30]])):
        prompts.insert(np.array([tokens]), computed("dense", tokens))
        assert prompts.fetch(np.array([[*tokens, 1]]))[1] == 40
    assert not prompts._coming


def test_an_unknown_class_is_logged_once(caplog):
    unknown = type("Odd", (programs.Unknown,), {})
    for prompts in (PromptCache(), PromptCache()):
        prompts.insert(range(20), [unknown(1)])
        prompts.insert(range(25), [unknown(2)])
        assert prompts.fetch(range(26))[1] == 25
    assert [record.message.split()[1] for record in caplog.records] == ["Odd"]
