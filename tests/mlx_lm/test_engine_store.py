"""`Engine(store=)` and `install(store=)`: prefixes from a store are loaded, or computed if they do not come."""

import gc
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_models import ended

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import Engine, install, tiny
from kvpool.adapters.mlx_lm import stored as module
from kvpool.groups import Group
from kvpool.store import DiskStore, MemoryStore, TieredStore
from kvpool.store.blocks import TierStats

ARCHS = ("tiny", "gemma3_text", "qwen3_5")  # one table; windows; states
PROMPT = np.random.default_rng(11).integers(0, 200, 400).tolist()
OTHER = np.random.default_rng(12).integers(0, 200, 300).tolist()


class Lasting:
    """A store that engines do not close. `slow` seconds per load; `broken`: every call fails; `lies`: wrong tokens."""

    def __init__(self, layout, held=()):
        self.inner, self.layout = MemoryStore(layout, 2**28), layout
        self.inner._held.update(held)
        self.slow, self.broken, self.loads, self.open_gate = 0.0, False, 0, threading.Event()
        self.open_gate.set()

    def __getattr__(self, name):
        if self.broken and name in ("lookup", "load", "store"):
            raise OSError("planted")
        return getattr(self.inner, name)

    def load(self, blocks, rows):
        self.loads += 1
        self.open_gate.wait(20)
        time.sleep(self.slow)
        if self.broken:
            raise OSError("planted")
        return self.inner.load(blocks, rows)

    def close(self):
        pass


@pytest.fixture(scope="module", params=ARCHS, ids=["llama", "gemma3", "qwen3_5"])
def model(request):
    return (tiny.make() if request.param == "tiny" else tiny_families.make(request.param))[0]


def answer(engine, prompt=PROMPT, **options):
    sample = engine.generate(prompt, max_tokens=12, **options).samples[0]
    return sample.tokens.tolist(), sample.logprobs.tolist(), sample.output.num_cached


def engine_of(model, store, num_blocks=256, **options):
    return Engine(model, num_blocks, store=store, **options)


def with_new_store(model, num_blocks=256):
    """An engine and its empty store."""
    made = []
    return engine_of(model, lambda layout: made.append(Lasting(layout)) or made[0], num_blocks), made[0]


def with_busy_writer(model, num_blocks=256):
    """An engine whose thread that writes waits for the gate of its store, and the store."""
    engine, store = with_new_store(model, num_blocks)
    store.open_gate.clear()
    engine.kv.stored._writer.put(lambda: store.open_gate.wait(20))
    return engine, store


def checked(engine):
    """Close an engine, in which nothing may be left."""
    engine.scheduler.check()
    engine.close()
    engine.kv.pool.check()
    assert engine.kv.pool.stats().used == 0
    return engine.kv.stored.stats()


@pytest.fixture(scope="module")
def saved(model):
    """What an engine saves of the prompt, and what one without a store answers."""
    with Engine(model, 256) as engine:
        tokens, logprobs, _ = answer(engine)
    engine, store = with_new_store(model)
    assert answer(engine)[:2] == (tokens, logprobs)
    checked(engine)
    return store, (tokens, logprobs)


@pytest.fixture
def filled(saved):
    """A store of the test's own that has the prompt, and what an engine without a store answers."""
    return Lasting(saved[0].layout, saved[0].inner._held), saved[1]


@pytest.fixture
def engine(model, filled):
    """An engine on the store that has the prompt. Nothing may be left in it when the test ends."""
    one = engine_of(model, filled[0])
    yield one
    checked(one)


def test_answer_after_a_restart_has_the_same_bits_and_computes_little(model, filled):
    """Also if it is the next turn, which begins with the prompt and its answer."""
    store, due = filled
    longer = [*PROMPT, *due[0], *OTHER[:40]]
    with Engine(model, 256) as plain:
        due_longer = answer(plain, longer)[0]
    for prompt in (PROMPT, longer):
        engine = engine_of(model, store)
        tokens, logprobs, cached = answer(engine, prompt)
        assert (tokens, logprobs) == due if prompt is PROMPT else tokens == due_longer
        assert cached >= 368, "most of the prompt was computed again"
        assert answer(engine, prompt, namespace=bytes([len(prompt) % 256]))[::2] == (tokens, 0)  # of another tenant
        stats = checked(engine)
        assert stats.loads == 1 and stats.loaded_tokens == cached


def test_blocks_that_the_disk_refused_are_saved_with_a_later_answer(tmp_path):
    made = []

    def make(layout):
        made.extend([MemoryStore(layout, 1 << 26), DiskStore(str(tmp_path / "store"), layout, 1 << 28)])
        return TieredStore(made)

    engine = engine_of(tiny.make()[0], make)
    memory, disk = made
    assert disk.ready.wait(60)
    disk._paused_until = float("inf")
    answer(engine)
    engine.kv.stored.flush()
    assert memory.stats()["memory"].blocks and not disk.stats()["disk"].blocks
    disk._paused_until = 0.0
    answer(engine)
    engine.kv.stored.flush()
    assert disk.stats()["disk"].blocks == memory.stats()["memory"].blocks
    checked(engine)


def test_store_that_fails_while_it_loads_costs_nothing_but_time(engine, filled):
    store, due = filled
    store.open_gate.clear()
    threading.Timer(0.1, lambda: (setattr(store, "broken", True), store.open_gate.set())).start()
    assert answer(engine)[:2] == due
    store.broken = False
    assert engine.kv.stored.stats().loads == 0


@pytest.mark.parametrize("is_measured", [False, True])
def test_load_that_is_too_slow_is_given_up_and_computed(engine, filled, is_measured, monkeypatch):
    """Slower than computing once that is known, else than one may wait. What comes too late is counted back."""
    store, due = filled
    if is_measured:
        answer(engine, OTHER, namespace=b"x")  # how fast the model computes
    else:
        monkeypatch.setattr(module, "PATIENCE", 0.2)
    store.open_gate.clear()
    assert answer(engine)[:2] == due
    assert engine.kv.stored.stats().late_loads == 1
    store.open_gate.set()
    engine.kv.stored._reader.put((read := threading.Event()).set)
    assert read.wait(20) and engine.kv.stored._staged == 0


def test_store_that_was_slow_once_is_read_again(engine, filled):
    store, due = filled
    store.slow = 0.5
    assert answer(engine)[:2] == due  # nobody knows yet how fast the model computes
    store.slow = 0.0
    answer(engine, OTHER, namespace=b"x")
    tries = 0
    while engine.kv.stored.stats().loads < 2:
        tries += 1
        assert tries < 100
        engine.kv.pool.prefix.flush()
        assert answer(engine)[:2] == due
    assert engine.kv.stored.stats().computed_loads > 0


def test_others_run_while_a_prompt_is_loaded(engine, filled):
    store, due = filled
    store.open_gate.clear()
    events = []
    waits = engine.submit(PROMPT, max_tokens=12, on_token=lambda event: events.append("loaded"))
    engine.submit(OTHER[:20], max_tokens=12, on_token=lambda event: events.append("other"))
    _step_until(engine, lambda: "other" in events)
    assert "loaded" not in events
    store.open_gate.set()
    assert ended(engine)[waits].tokens.tolist() == due[0]


@pytest.mark.long
@pytest.mark.parametrize("model", (*ARCHS, "baichuan_m1"), indirect=True)  # the last: states, windows, full layers
@pytest.mark.parametrize("first_ends", ["loaded", "cancelled"])
def test_two_loads_of_a_common_prefix_at_once_have_the_same_bits(model, filled, first_ends, monkeypatch):
    for name, value in (("FIRST_SLICE", 2048), ("MOST_SLICE", 2048), ("STEP_NBYTES", 1)):  # one slice per step
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.StoredPrefixes, "_is_late", lambda self, load: False)
    store, due = filled
    longer = [*PROMPT, *OTHER[:40]]
    with Engine(model, 256) as plain:
        due_longer = answer(plain, longer)
    engine = engine_of(model, store, num_blocks=400)
    loads = engine.kv.stored._loads
    engine.submit(OTHER[:100], max_tokens=900, namespace=b"x", eos=(), id="runs")
    engine.submit(PROMPT, max_tokens=12, id="first")
    _step_until(engine, lambda: any(load.num_come for load in loads.values()))
    engine.submit(longer, max_tokens=12, id="second")
    _step_until(engine, lambda: sum(load.handle >= 0 for load in loads.values()) == 2)
    if first_ends == "cancelled":
        engine.cancel("first")
    expected = {"second": due_longer[0]} | ({"first": due[0]} if first_ends == "loaded" else {})
    done = {}
    while not set(done) >= set(expected):
        done |= {completion.id: completion.samples[0] for completion in engine.step()}
    engine.cancel("runs")
    assert {id: sample.tokens.tolist() for id, sample in done.items()} == expected
    assert done["second"].output.num_cached >= 368
    assert checked(engine).loads == len(expected)


ENDS = {  # what ends a load, and whether it is counted as dropped
    "cancelled": (lambda engine: engine.cancel("loads"), True),
    "reset": (lambda engine: engine.reset(), False),
    "flushed": (lambda engine: engine.kv.pool.prefix.flush(), False),  # the pool, by itself
    "its blocks are for others": (lambda engine: engine._make_way(engine.kv.stored), True),
    "its deadline": (lambda engine: setattr(engine.scheduler._core, "clock", lambda: 1e18) or engine.step(), True),
}


@pytest.mark.parametrize("how", ENDS)
def test_load_that_ends_early_leaves_nothing_and_the_prompt_is_computed(model, filled, how):
    (end, is_dropped), (store, due) = ENDS[how], filled
    engine = _loading(model, store, deadline=1e9 if how == "its deadline" else None)
    found = end(engine)
    if how in ("cancelled", "reset", "its deadline"):
        assert engine.num_unfinished == engine.kv.pool.stats().used == 0
        assert how != "its deadline" or found[0].samples[0].finish_reason == "deadline"
    stats = engine.kv.stored.stats()
    assert (stats.dropped_loads, stats.late_loads) == (int(is_dropped), 0)
    if how != "its blocks are for others":
        store.open_gate.set()
    if not engine.num_unfinished:
        engine.submit(PROMPT, max_tokens=12)
    assert [one.tokens.tolist() for one in ended(engine).values()] == [due[0]]
    store.open_gate.set()
    checked(engine)


def test_pool_that_is_too_small_for_a_load_beside_others_computes(filled, model):
    store, due = filled
    engine = engine_of(model, store, num_blocks=40)
    engine.submit(OTHER, max_tokens=12, namespace=b"x")
    engine.submit(PROMPT, max_tokens=12)
    engine.submit(PROMPT, max_tokens=12)
    done = [*ended(engine).values()]
    assert [one.tokens.tolist() for one in done].count(due[0]) == 2
    checked(engine)


def test_saves_hold_a_part_of_the_pool_only(model):
    engine, store = with_busy_writer(model, 300)
    stored = engine.kv.stored
    for n in range(16):
        answer(engine, [n, *OTHER])
    held = [sum(stored._ids(save.handle, part).size for part in save.parts) for save in stored._saves]
    most = module.PINNED_SHARE * engine.kv.pool.num_blocks
    assert sum(held) <= max(most, *held) and stored.stats().dropped_saves
    store.open_gate.set()
    checked(engine)


def test_prompt_larger_than_the_share_of_saves_is_saved_though_its_answer_ends_first(model):
    engine, store = with_busy_writer(model, 200)
    engine.generate(PROMPT, max_tokens=40)
    assert_saved(engine, store)


def test_answer_whose_prompt_gave_its_blocks_to_others_is_saved_whole(model):
    engine, store = with_busy_writer(model)
    engine.submit(PROMPT, max_tokens=12)
    _step_until(engine, lambda: engine.is_saving)
    engine._make_way(engine.kv.stored)
    assert not engine.is_saving
    assert_saved(engine, store)


def test_nothing_is_copied_for_a_store_that_pauses_and_all_of_it_later(model):
    engine, store = with_new_store(model)
    store.is_paused = True
    engine.submit(PROMPT, max_tokens=12)
    _step_until(engine, lambda: engine.kv.stored.stats().dropped_saves)
    assert not engine.is_saving
    store.is_paused = False
    assert_saved(engine, store)


def assert_saved(engine, store):
    """Let everything end: the store has the prompt."""
    store.open_gate.set()
    ended(engine)
    engine.kv.stored.flush()
    assert known_to(store, engine, PROMPT) >= 368
    checked(engine)


def test_all_samples_of_a_request_are_saved():
    engine, store = with_new_store(tiny.make()[0])
    samples = engine.generate(PROMPT, max_tokens=60, n=2, temperature=1.0, seed=1, eos=()).samples
    engine.kv.stored.flush()
    first, second = (PROMPT + sample.tokens.tolist() for sample in samples)
    assert first[:420] != second[:420]
    assert min(known_to(store, engine, tokens) for tokens in (first, second)) >= 432
    checked(engine)


def known_to(store, engine, tokens):
    """Return how many tokens of a prompt a store has with all that they need."""
    names = engine.kv.stored.layout.blocks(np.array(tokens, np.int32), b"")
    return engine.kv.stored._longest([store.lookup(blocks) for blocks in names])


KINDS = (
    Group.full(), Group.full(block_size=32), Group.window(40), Group.window(50, keep=5), Group.window(1),
    Group.window(24, block_size=32), Group.chunk(48), Group.chunk(20), Group.state(1, blocks=1),
)  # fmt: skip


def prefixes_of(groups):
    """A `StoredPrefixes` that can tell what a store has for these layer groups, and nothing else."""
    prefixes = module.StoredPrefixes.__new__(module.StoredPrefixes)
    sizes = [group.block_size or 16 for group in groups if group.kind != "state"]
    prefixes._groups, prefixes._grain = groups, max(sizes, default=16)
    prefixes._sizes = [prefixes._grain if group.kind == "state" else group.block_size or 16 for group in groups]
    prefixes._needs_checkpoints = any(group.kind != "full" for group in groups)
    return prefixes


def is_read(group, at, length):
    """Whether a prompt of `length` tokens goes on with the token `at` of a group of window or chunk, or of all."""
    if group.kind == "window":
        return at > length - group.size or at < group.keep
    return group.kind == "full" or at >= length - length % group.size


def test_longest_hit_has_each_block_that_its_next_token_reads(seeds=200):
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    rng, found = np.random.default_rng(seed), set()
    for _ in range(seeds):
        groups = tuple(KINDS[number] for number in rng.integers(0, len(KINDS), rng.integers(1, 4)))
        prefixes = prefixes_of(groups)
        grain, length = prefixes._grain, int(rng.integers(0, 12)) * prefixes._grain
        masks = [rng.random(length // size) < rng.choice([0.5, 0.9, 1.0]) for size in prefixes._sizes]
        due = 0
        for most in range(grain, length + 1, grain):
            has_all = True
            for group, size, mask in zip(groups, prefixes._sizes, masks, strict=True):
                if group.kind == "state":
                    has_all &= bool(mask[most // size - 1])
                    continue
                blocks = {at // size for at in range(most) if is_read(group, at, most)}
                has_all &= all(mask[block] for block in blocks)
            due = most if has_all else due
        assert prefixes._longest(masks) == due, (groups, masks)
        found.add(due > 0)
    assert found == {True, False}


def test_miss_of_a_long_prompt_makes_as_many_calls_as_one_of_a_short_prompt():
    prefixes, calls = prefixes_of((Group.full(), Group.window(64), Group.state(1, blocks=1))), []
    for length in (64, 4096):  # of blocks: all rows are there, no state is
        masks = [np.ones(length, bool), np.ones(length, bool), np.zeros(length, bool)]
        calls.append([])
        sys.setprofile(lambda frame, event, what: calls[-1].append(event))
        try:
            assert prefixes._longest(masks) == 0
        finally:
            sys.setprofile(None)
    assert len(calls[0]) == len(calls[1])


def test_flush_waits_for_a_writer_that_is_behind_without_spinning(model, monkeypatch):
    for name in ("FIRST_SLICE", "MOST_SLICE", "STAGED"):
        monkeypatch.setattr(module, name, 2048)
    (engine, store), looks = with_new_store(model), []
    store.open_gate.clear()
    store.store = lambda blocks, rows: store.open_gate.wait(20) and store.inner.store(blocks, rows)
    look = module.StoredPrefixes._can_export
    monkeypatch.setattr(module.StoredPrefixes, "_can_export", lambda self: looks.append(1) or look(self))
    answer(engine)
    looks.clear()
    engine.kv.stored.export(timeout=0.5)
    assert engine.kv.stored.is_saving and 0 < len(looks) < 400  # four a turn, and a turn is 10 ms
    store.open_gate.set()
    engine.kv.stored.flush()
    assert not engine.kv.stored.is_saving
    checked(engine)


def test_fetch_and_commit_of_mlx_lm_caches_use_the_store(model, tmp_path):
    def store(layout):
        return DiskStore(str(tmp_path / "d"), layout, 10**9)

    def run():
        with install(model, 256, prefix_cache=True, store=store) as kv:
            kv.stored.store.ready.wait(10)
            caches, cached = kv.fetch(PROMPT)
            steps = generate_step(mx.array(PROMPT[cached:]), model, prompt_cache=caches, max_tokens=8)
            tokens = [int(token) for token, _ in steps]
            kv.commit(caches, [*PROMPT, *tokens])
            kv.close()
        return tokens, cached

    tokens, cached = run()
    assert cached == 0
    again, cached = run()
    assert again == tokens and cached >= 368


def test_weights_that_differ_in_one_element_share_nothing():
    one, other = (tiny.make()[0] for _ in range(2))
    assert module.fingerprint(one) == module.fingerprint(other)
    weight = other.model.layers[-1].mlp.down_proj.weight
    weight[0, 0] += 1
    assert module.fingerprint(one) != module.fingerprint(other)


def test_store_without_a_prefix_cache_or_of_another_layout_is_refused(model, saved):
    with pytest.raises(ValueError, match="prefix_cache"):
        install(model, 64, store=lambda layout: MemoryStore(layout, 2**24))
    with pytest.raises(ValueError, match="other layout"):
        Engine(model, 64, block_size=32, store=saved[0])


def test_table_that_is_full_is_answered():
    engine, _ = with_new_store(tiny.make()[0], 32)
    most = engine.kv.pool.options.max_blocks_per_seq * engine.kv.pool.block_size
    assert most == 31 * 16
    sample = engine.generate(PROMPT, max_tokens=most - len(PROMPT) + 1, eos=()).samples[0]
    assert len(sample.tokens) == most - len(PROMPT) + 1
    assert checked(engine).saves >= 1


def test_save_that_fails_loses_no_answer(engine, filled, monkeypatch, caplog):
    due = filled[1]
    monkeypatch.setattr(engine.kv.stored, "save", lambda *given: 1 // 0)
    assert answer(engine)[:2] == due
    assert "was not saved" in caplog.text
    monkeypatch.undo()


def test_fetch_beside_an_engine_leaves_its_requests_alone(engine, filled):
    due = filled[1]
    id = engine.submit(PROMPT, max_tokens=12)
    with engine.kv as kv:
        caches, cached = kv.fetch([*PROMPT, *OTHER])
        assert cached >= 368
        del caches
    done = [*ended(engine).values()]
    assert [(one.id, one.tokens.tolist()) for one in done] == [(id, due[0])]


@pytest.mark.parametrize("call", ["wait", "_import"])
def test_fetch_that_is_interrupted_leaves_no_load(engine, monkeypatch, call):
    stored, own = engine.kv.stored, getattr(engine.kv.stored, call)

    def interrupted(*given):
        if any(load.handle >= 0 for load in stored._loads.values()):
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr(stored, call, interrupted)
    with engine.kv as kv, pytest.raises(KeyboardInterrupt):
        kv.fetch([*PROMPT, *OTHER])
    assert not stored.num_loads and not stored._ended and engine.kv.pool.stats().used == 0


def test_slice_that_could_not_be_imported_is_computed_with_all_behind_it(engine, filled, monkeypatch):
    for name in ("FIRST_SLICE", "MOST_SLICE"):
        monkeypatch.setattr(module, name, 2048)
    due = filled[1]
    arena, calls = engine.kv.stored._arenas[0], []

    def fails_once(ids, rows, real=arena.import_blocks):
        calls.append(ids)
        if len(calls) == 3:
            raise MemoryError("planted")
        real(ids, rows)

    monkeypatch.setattr(arena, "import_blocks", fails_once)
    engine.submit(PROMPT, max_tokens=12)
    done, errors = [], 0
    while engine.num_unfinished:
        try:
            done += engine.step()
        except MemoryError:
            errors += 1
    assert errors == 1
    sample = done[0].samples[0]
    assert (sample.tokens.tolist(), sample.logprobs.tolist()) == due
    assert sample.output.num_cached <= 32 and engine.kv.stored._staged == 0


def test_store_that_always_raises_is_in_the_log_once(filled, engine, caplog):
    store, due = filled
    store.broken, counts = True, []
    assert answer(engine)[:2] == due
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(0, 200, 100).tolist()
        answer(engine, prompt)
        while engine.is_saving:
            engine.step()
        counts.append(len(caplog.records))
    assert 1 <= counts[0] == counts[-1] <= 2, "one line for each thread that calls it"
    assert all(record.exc_info and "planted" in str(record.exc_info[1]) for record in caplog.records)


def test_closed_engine_saves_nothing(engine):
    engine.close()
    assert answer(engine, [*OTHER, 1])[2] == 0
    assert not engine.is_saving and engine.kv.pool.stats().used == 0


@pytest.mark.parametrize("error", [MemoryError("planted"), KeyboardInterrupt()], ids=repr)
def test_close_whose_copies_fail_gives_blocks_back_and_closes_the_store(model, error, monkeypatch):
    engine, store = with_busy_writer(model)
    closed, stored = [], engine.kv.stored

    def failing(*given):
        raise error

    monkeypatch.setattr(store, "close", lambda: closed.append(True))
    answer(engine)
    assert engine.is_saving
    monkeypatch.setattr(stored, "_export_one", failing)
    store.open_gate.set()
    with pytest.raises(type(error)):
        engine.close()
    engine.kv.pool.check()
    assert engine.kv.pool.stats().used == 0 and closed == [True]
    assert not stored._reader._thread.is_alive() and not stored._writer._thread.is_alive()


def test_prompt_that_is_cached_meanwhile_is_not_loaded_again(engine, filled, monkeypatch):
    monkeypatch.setattr(module, "MOST_LOADS", 1)
    due = filled[1]
    for _ in range(3):
        engine.submit(PROMPT, max_tokens=12)
    done = [*ended(engine).values()]
    assert [one.tokens.tolist() for one in done] == [due[0]] * 3
    assert engine.kv.stored.stats().loads == 1


def test_flush_after_the_weights_changed_loads_and_saves_nothing_more(engine, filled):
    store, _ = filled
    answer(engine)
    blocks = store.stats()["memory"].blocks
    engine.kv.flush()
    assert answer(engine)[2] == 0 and not engine.is_saving
    assert store.stats()["memory"].blocks == blocks


def test_cpu_time_of_the_threads_of_a_store_is_taken_from_that_of_saves(monkeypatch):
    engine, store = with_new_store(tiny.make()[0])
    stored, seconds = engine.kv.stored, iter((2.0, 5.0))
    monkeypatch.setattr(store, "stats", lambda: {"disk": TierStats(write_seconds=next(seconds))}, raising=False)
    names = stored.layout.blocks(PROMPT)[0][:1]
    for due in (2.0, 3.0):
        stored._credit = 0.0
        stored._give(names, np.zeros((1, stored.layout.groups[0].nbytes), np.uint8))
        stored.note(1.0, 0)
        assert module.SAVE_SHARE - due - 0.5 < stored._credit <= module.SAVE_SHARE - due
    monkeypatch.undo()
    checked(engine)


def test_copy_that_was_slow_once_is_made_while_others_run_when_its_time_has_come(model):
    engine, store = with_busy_writer(model)
    stored = engine.kv.stored
    answer(engine)
    store.open_gate.set()
    end = time.monotonic() + 60  # a hang
    while not stored._can_export() and time.monotonic() < end:
        stored.wait(0.01)
    stored._export.add(1, 1000.0)
    for seconds, is_due in ((0.0, False), (1e6, True)):
        stored._credit = 0.0
        stored.note(seconds, 0)
        stored.move(runs=True)
        assert (stored.stats().saved_blocks > 0) == is_due
    checked(engine)


def test_running_requests_are_not_preempted_for_saves():
    engine, store = with_busy_writer(tiny.make()[0], 32)
    answer(engine, OTHER[:60])
    answer(engine, OTHER[:120])
    assert engine.is_saving
    engine.generate(PROMPT, max_tokens=90, eos=())
    assert engine.scheduler.stats().preemptions == 0
    store.open_gate.set()
    checked(engine)


def test_engine_collected_while_it_loads_gives_all_back(model, filled):
    store, _ = filled
    engine = _loading(model, store)
    pool, threads = engine.kv.pool, [engine.kv.stored._reader._thread, engine.kv.stored._writer._thread]
    assert pool.stats().used
    del engine
    gc.collect()
    store.open_gate.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    pool.check()
    assert pool.stats().used == 0


def slowest(monkeypatch, rule, rng):
    """Time of load and rest, relative to computing, at worst of many loads on a clock that is counted."""
    prefixes, clock, worst = module.StoredPrefixes.__new__(module.StoredPrefixes), [0.0], 0.0
    prefixes._prefill = module._Rate()
    prefixes._prefill.add(1000, 1.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    for _ in range(300):
        begin, found = sorted(rng.integers(0, 10_000, 2).tolist())
        tokens = np.zeros(found + int(rng.integers(1, 1000)), np.int32)
        load = module._Load("id", tokens, b"", b"", 0.0, 0.0, begin, found=found, nbytes=found - begin)
        due, clock[0] = (len(tokens) - begin) / 1000, 0.0
        pace, stalls = rng.choice([0.3, 1.0, 3.0, 100.0]) * 1000, rng.random() * load.nbytes
        while load.num_come < load.nbytes and not rule(prefixes, load) and clock[0] < 3 * due:
            clock[0] += 0.001
            load.num_come = int(min(pace * clock[0], stalls, load.nbytes))
        rest = (len(tokens) - begin - load.num_come) / 1000
        worst = max(worst, (clock[0] + rest - 0.022) / due)
    monkeypatch.undo()
    return worst


@pytest.mark.long
def test_load_and_rest_take_five_percent_longer_than_computing_at_most(monkeypatch):
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    assert slowest(monkeypatch, module.StoredPrefixes._is_late, np.random.default_rng(seed)) <= 1.05

    def estimates(_, load):  # the rest of a load from its mean pace: one that stalls is noticed late
        share, due = (load.num_come + 1e-9) / load.nbytes, len(load.tokens) / 1000
        return module.time.monotonic() * (1 / share - 1) > due * (1 - share + module.TOLERANCE)

    assert slowest(monkeypatch, estimates, np.random.default_rng(seed)) > 1.05


def test_load_that_stalls_before_anything_was_computed_is_given_up(monkeypatch):
    prefixes = module.StoredPrefixes.__new__(module.StoredPrefixes)
    prefixes._prefill = module._Rate()
    load = module._Load("id", np.zeros(99), b"", b"", 0.0, 8.0, 0, found=96, nbytes=96, num_come=32)
    monkeypatch.setattr(module.time, "monotonic", lambda: 8.0 + module.PATIENCE)
    assert not prefixes._is_late(load)
    monkeypatch.setattr(module.time, "monotonic", lambda: 8.1 + module.PATIENCE)
    assert prefixes._is_late(load)


def _loading(model, store, deadline=None):
    """An engine whose request waits for the store."""
    store.open_gate.clear()
    engine = engine_of(model, store)
    engine.submit(PROMPT, max_tokens=12, id="loads", deadline=deadline)
    _step_until(engine, lambda: store.loads)
    return engine


def _step_until(engine, holds):
    end = time.monotonic() + 600  # a hang
    while not holds():
        assert time.monotonic() < end
        engine.step()
