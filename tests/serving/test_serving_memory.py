"""``kvpool serve --memory auto`` beside a process that takes memory; and what `Memory` does to an engine.

``KVPOOL_PICTURE=docs/memory.png pytest -m long`` on this file draws what happened.
"""

import asyncio
import concurrent.futures
import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_models import on_cpu
from server_process import Server

from benchmarks import picture, tiny_families
from kvpool import governor
from kvpool.adapters.mlx_lm import Engine, loading, tiny
from kvpool.adapters.mlx_lm.drafts import DraftModel
from kvpool.adapters.prompt_cache import PromptCache
from kvpool.cli import build_parser, serve
from kvpool.config import available_memory_nbytes
from kvpool.governor import Decision, Governor, Holder, Machine
from kvpool.serving import memory
from kvpool.serving.memory import Memory
from kvpool.store import MemoryStore

MIB = 2**20
WIDE = tiny.CONFIG | {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
WIDE |= {"max_position_embeddings": 512}
MOST = 768  # MiB of the cache
BODIES = [
    {"prompt": f"Page {n} of the book", "max_tokens": 150, "temperature": 0, "ignore_eos": True} for n in range(14)
]
HOG = """
import sys
held = []
for line in sys.stdin:
    held = [bytearray(b"x" * 2**20) for _ in range(int(line))]
    print("done", flush=True)
"""


def save_wide(folder):
    with on_cpu():
        model = tiny.llama.Model(tiny.llama.ModelArgs.from_dict(WIDE))
        tiny.randomize(model)
        tiny.write(folder, WIDE, model, tiny.tokenizer())


def rss(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


class Hog:
    """Another process, which takes and frees memory."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.held = 0

    def hold(self, mib):
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        self.held = mib


class Watch:
    """Notes, twice a second, what a server and the other process hold."""

    def __init__(self, server, hog):
        self._server, self._hog, self._began, self.moments = server, hog, time.monotonic(), []
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self.is_over.wait(0.5):
            found = self._server.metrics()
            running = sum(found[f'kvpool_requests{{state="{state}"}}'] for state in ("prefilling", "decoding"))
            self.moments.append(
                (
                    time.monotonic() - self._began,
                    self._hog.held,
                    found.get("kvpool_memory_held_bytes", 0) / MIB,
                    rss(self._server.process.pid),
                    found["kvpool_memory_buffers_bytes"] / MIB,
                    running,
                )
            )

    def wait(self, condition, seconds):
        """Wait until a condition of the latest moment holds."""
        end = time.monotonic() + seconds
        while not (self.moments and condition(*self.moments[-1])):
            assert time.monotonic() < end, self.moments[-1:]
            time.sleep(0.2)
        return self.moments[-1]

    def end(self):
        self.is_over.set()
        self._thread.join()


def draw(path, moments):
    room = {"left": 0.08, "right": 0.92, "bottom": 0.14, "top": 0.83}
    title = "The server gives memory back, and takes it again"
    about = "kvpool serve --memory on Linux, a model with 128 KiB of keys and values per token; all answers equal"
    figure = picture.Picture((9.6, 4.2), title, about, grid={"nrows": 1, "ncols": 1}, room=room)
    axes, seconds = figure.panels[0, 0], [moment[0] for moment in moments]
    for index, label, color in (
        (1, "another process", picture.OTHER),
        (2, "cache", picture.BLOCKS),
        (3, "RSS of the server", picture.INK),
    ):
        axes.plot(seconds, [moment[index] for moment in moments], label=label, color=color)
    running = [moment[5] * 20 for moment in moments]
    axes.fill_between(seconds, running, color=picture.BLOCKS_LIGHT, label="requests that run, x 20", linewidth=0)
    picture.name(axes, "", "MiB", "seconds")
    picture.legend(axes, loc="upper right")
    figure.save(path)


def ask_all(server):
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as threads:
        found = list(threads.map(lambda body: server.post("/v1/completions", body), BODIES))
    assert {status for status, _ in found} == {200}, found
    return [answer["choices"][0]["text"] for _, answer in found]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_server_gives_memory_back_and_takes_it_again_with_equal_answers(tmp_path):
    save_wide(tmp_path)
    with Server("--num-blocks", str(MOST // 2), model=str(tmp_path)) as fixed:
        expected = ask_all(fixed)
    hog, texts = Hog(), []
    keep_free = available_memory_nbytes() // MIB - MOST - 1536
    options = ("--memory", f"80MiB:{MOST}MiB", "--keep-free", f"{keep_free}MiB")
    with Server(*options, model=str(tmp_path)) as server:
        watch = Watch(server, hog)
        try:
            texts += ask_all(server)
            before = watch.wait(lambda *moment: moment[2] > 0.9 * MOST and moment[5] == 0, 60)
            asked = threading.Thread(target=lambda: texts.extend(ask_all(server)))
            asked.start()
            while hog.held < 4096 and watch.moments[-1][2] > MOST / 3:
                hog.hold(hog.held + 256)
                time.sleep(3)
            asked.join()
            small = watch.wait(lambda *moment: moment[2] <= MOST / 3 and moment[5] == 0, 60)
            time.sleep(2)
            small = watch.moments[-1]
            hog.hold(0)
            end = time.monotonic() + 240
            while watch.moments[-1][2] < small[2] + 64 and time.monotonic() < end:
                texts += ask_all(server)
            watch.wait(lambda *moment: moment[2] >= small[2] + 64, 1)
        finally:
            hog.process.kill()
            watch.end()
            if path := os.environ.get("KVPOOL_PICTURE"):
                draw(Path(path), watch.moments)
        reasons = {name for name in server.metrics() if name.startswith("kvpool_memory_resizes_total")}
    assert texts == expected * (len(texts) // len(expected)) and len(texts) >= 3 * len(expected)
    assert before[3] - small[3] >= 0.95 * (before[2] - small[2]), (before, small)
    assert small[4] < 0.1 * MOST
    assert {re.search('reason="(.*)"', name)[1] for name in reasons} == {governor.OTHERS, governor.WAITING}
    said = b"".join(server.errors).decode()
    assert "reason=" in said and "others need memory" in said


# -------------------------------------------------------------------------------------- in one process


class Planned(Governor):
    """Decides as a list says."""

    def decide(self, machine, holders):
        self.seen = machine, holders
        size, reason = self.plan.pop(0)
        size = size or holders[0].size
        return Decision(size, reason, (size,), True)


@pytest.fixture
def engine():
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 200, tokenizer=tokenizer, block_size=8, max_running=4) as one:
            yield one


def governed(*plan):
    found = Memory(Planned(0, 2**40), 4)
    found.governor.plan = list(plan)
    return found


def test_look_resizes_between_two_steps_and_tokens_stay(engine):
    unit = memory.unit_nbytes(engine)
    prompt = "The block table maps"
    expected = engine.generate(prompt, max_tokens=60).text
    engine.submit(prompt, max_tokens=60)
    one = governed((40 * unit, governor.OTHERS), (160 * unit, governor.WAITING), (0, governor.KEEP))
    done = []
    for number in range(500):
        done += engine.step()
        if number in (3, 9, 15):
            one.look(engine)
        if done:
            break
    assert done[0].text == expected
    assert engine.kv.pool.num_blocks == 160
    engine.kv.pool.check()
    found = {metric.name: metric.samples for metric in one.metrics()}
    assert found["kvpool_memory_held_bytes"] == (({}, 160 * unit),)
    assert dict((labels["reason"], count) for labels, count in found["kvpool_memory_resizes_total"]) == {
        governor.OTHERS: 1,
        governor.WAITING: 1,
    }


def test_look_below_what_requests_hold_takes_what_it_can(engine):
    unit = memory.unit_nbytes(engine)
    engine.submit("The block table maps " * 20, max_tokens=200)
    for _ in range(4):
        engine.step()
    one = governed((unit, governor.OTHERS))
    one.look(engine)
    holder = one.governor.seen[1][0]
    assert holder.size == 200 * unit and holder.live >= 50 * unit
    assert holder.live < engine.kv.pool.num_blocks * unit <= holder.size
    engine.kv.pool.check()


def test_holder_counts_requests_that_could_run_beside_those_that_do(engine):
    unit = memory.unit_nbytes(engine)
    for _ in range(6):
        engine.submit("The block table maps", max_tokens=100)
    one = governed((0, governor.KEEP))
    one.look(engine)
    assert one.governor.seen[1][0].waiting == 4 * 15 * unit  # 120 tokens each


def active():
    """Bytes of all arrays of MLX in this process."""
    gc.collect()
    return mx.get_active_memory()


def fails(num_blocks):
    raise MemoryError("planted")


def test_pool_of_a_draft_model_has_as_many_tokens_whatever_the_size_and_answers_stay(monkeypatch):
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 200, block_size=8, max_running=4, tokenizer=tokenizer) as alone:
            expected = alone.generate("The block table maps", max_tokens=60).text
        del alone
        begun = active()
        draft = DraftModel(model, 401, num_drafts=3)
        with Engine(model, 200, block_size=8, max_running=4, tokenizer=tokenizer, speculate=draft) as engine:
            unit, done = memory.unit_nbytes(engine, draft), []
            with monkeypatch.context() as patch:  # the second pool gets no memory: both are as before
                patch.setattr(draft.engine.kv, "resize", fails)
                memory.resize(engine, 300 * unit, draft)
            assert (engine.kv.pool.num_blocks, draft.engine.kv.pool.num_blocks) == (200, 401)
            sizes = [30, 120, 40, 300]
            one = Memory(Planned(0, 2**40), 4, draft)
            one.governor.plan = [(blocks * unit, governor.OTHERS) for blocks in sizes]
            engine.submit("The block table maps", max_tokens=60)
            for number in range(200):
                done += engine.step()
                if number % 3 == 1 and sizes:
                    one.look(engine)
                    blocks = sizes.pop(0)
                    assert (engine.kv.pool.num_blocks, draft.engine.kv.pool.num_blocks) == (blocks, 1 + 2 * blocks)
                    assert 0 <= active() - begun - blocks * unit < unit
                    draft.engine.scheduler.check()
                if done:
                    break
            assert done[0].text == expected and not sizes
            assert engine.scheduler.stats().accepted_tokens > 10
            assert engine.generate("The block table maps", max_tokens=60).text == expected


def test_sizes_that_the_server_is_given_hold_the_pool_of_a_draft_model_too(monkeypatch):
    given = ["--memory", "2MiB:128MiB", "--keep-free", "1MiB", "--speculate", "3", "--draft-model", "tiny"]
    args = build_parser().parse_args(["serve", "--model", "tiny", *given, "--max-running", "2"])
    settings, made = SimpleNamespace(chat_template=None, defaults={}), []
    with on_cpu():
        weights = -active()
        models = [tiny.make()[0] for _ in range(2)]
        mx.eval([one.parameters() for one in models])
        weights += active()
        del models
        begun = active() + weights
        engine = serve.make_engine(args, serve.engine_options(args, 16), settings, serve.bounds_of(args), made)
        sizes = [active() - begun]
        tokens = 16 * engine.kv.pool.num_blocks  # of 3 layers of 2 x 32 numbers, twice, in each model
        assert 0 <= sizes[0] - 2 * tokens * 3 * 2 * 32 * 2 * 4 < 2**14
        for pressure in (governor.CRITICAL, governor.NORMAL, governor.NORMAL):
            machine = Machine(100.0 * len(sizes), 2**40, pressure)
            monkeypatch.setattr(memory, "seen", lambda machine=machine: machine)
            for _ in range(20):
                engine.submit("The block table maps", max_tokens=500)
            made[0].look(engine)
            sizes.append(active() - begun)
        engine.close()
    assert 1.9 * MIB < sizes[1] <= 2 * MIB < sizes[3] < sizes[0] <= 64 * MIB


def test_server_with_a_draft_model_and_a_store_gives_memory_back_when_idle_and_answers_as_before(tmp_path):
    given = ("--memory", "2MiB:8MiB", "--idle-release", "1", "--keep-free", "1MiB", "--max-running", "4")
    drafts = ("--speculate", "3", "--draft-model", "tiny")
    body = {"prompt": "The block table maps", "max_tokens": 60, "temperature": 0}
    with Server("--num-blocks", "40") as fixed:
        expected = fixed.post("/v1/completions", body)[1]["choices"]
    with Server(*given, *drafts, "--store", str(tmp_path / "store"), "--store-memory", "1MiB") as server:
        for _ in range(2):
            assert server.post("/v1/completions", body)[1]["choices"] == expected
            end = time.monotonic() + 60
            while not 0 < (held := server.metrics()["kvpool_memory_held_bytes"]) <= 2 * MIB:
                assert time.monotonic() < end, held
                time.sleep(0.2)
        assert server.metrics()["kvpool_accepted_tokens_total"] > 20
        assert server.metrics()["kvpool_store_saved_blocks_total"] > 0


def test_look_that_always_fails_is_in_the_log_once(monkeypatch, caplog):
    calls = []

    async def ask(call):
        calls.append(call)
        if len(calls) == 20:
            raise asyncio.CancelledError
        raise OSError("planted")

    monkeypatch.setattr(memory, "SECONDS", 0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Memory(Governor(0, 1), 1).watch(SimpleNamespace(failure=None, ask=ask)))
    (told,) = caplog.records
    assert "this look failed" in told.getMessage() and "planted" in str(told.exc_info[1])


def test_memory_that_a_store_may_still_take_is_not_for_the_pool(monkeypatch):
    store = partial(MemoryStore, max_nbytes=64 * MIB)
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 200, tokenizer=tokenizer, block_size=8, max_running=4, store=store) as engine:
            unit, stats = memory.unit_nbytes(engine), engine.kv.stored.store.stats
            one = Memory(Governor(2 * unit, 400 * unit), 4)
            for number in range(20):
                taken = engine.kv.pool.num_blocks * unit + stats()["memory"].nbytes
                machine = Machine(0.0, 64 * MIB + 100 * unit - taken)
                monkeypatch.setattr(memory, "seen", lambda machine=machine: machine)
                one.look(engine)
                assert one.governor.limit == 100 * unit >= engine.kv.pool.num_blocks * unit
                engine.generate(f"{number} times the block table maps", max_tokens=20)
            assert stats()["memory"].nbytes > 10 * unit


class Shared:
    """Two engines and a prompt cache under one governor, on a machine with others. Sizes are blocks of an engine."""

    total, reserve, least = 600, 60, 16  # the least of an engine holds all that it runs at a time

    def __init__(self, engines, prompts):
        self.engines, self.prompts = engines, prompts
        self.unit, self.draw, self.now, self.others = memory.unit_nbytes(engines[0]), random.Random(1), 0.0, 0
        sizes = (size * self.unit for size in (2 * self.least, self.total, self.reserve))
        self.governor, self.begun = Governor(*sizes, pause=4.0), mx.get_active_memory() - self.sizes()[0]

    def sizes(self):
        """Bytes of the pools, and of the prompt cache."""
        return sum(one.kv.pool.num_blocks for one in self.engines) * self.unit, self.prompts.nbytes

    def taken(self):
        """What is really there: the arrays of MLX, and the index of the prompt cache."""
        mx.clear_cache()
        rows = self.prompts._index.rows if len(self.prompts) else []
        index = self.prompts.nbytes - sum(row.nbytes for row in rows if row is not None)
        return mx.get_active_memory() - self.begun + index

    def above(self):
        """Blocks by which they exceed what others leave, or the least that they need."""
        return self.taken() / self.unit - max(self.total - self.others - self.reserve, 2 * self.least)

    def work(self, length=30):
        for engine in self.engines:
            for _ in range(self.draw.randrange(3)):
                engine.submit([self.draw.randrange(200) for _ in range(length)], max_tokens=4)
            for _ in range(5):
                engine.step()
        for _ in range(4):
            cache, rows = KVCache(), mx.ones((1, 1, 300, 64))
            mx.eval(cache.update_and_fetch(rows, rows))
            self.prompts.insert([self.draw.randrange(200) for _ in range(300)], [cache])

    def look(self):
        """The prompt cache would have an eighth more than it has."""
        holders = [memory.holder_of(one, 2)._replace(least=self.least * self.unit) for one in self.engines]
        filled, self.now = self.prompts.nbytes, self.now + 1
        more = filled // 8 + 10 * self.unit
        holders.append(Holder("prompts", self.prompts.max_bytes, 0, filled, more, fills=True))
        available = max(0, (self.total - self.others) * self.unit - self.taken())
        *sizes, most = self.governor.decide(Machine(self.now, available), holders).sizes
        for engine, size in zip(self.engines, sizes, strict=True):
            memory.resize(engine, size)
        if most != self.prompts.max_bytes:
            self.prompts.resize(most)
        return [size / self.unit for size in (*sizes, most)]


@pytest.fixture
def shared():
    with on_cpu():
        model = tiny.make()[0]
        engines = [Engine(model, 60, block_size=8, max_running=2) for _ in range(2)]
        mx.eval(model.parameters())
        gc.collect()
        mx.clear_cache()
        yield Shared(engines, PromptCache(300 * memory.unit_nbytes(engines[0])))
        for engine in engines:
            engine.kv.pool.check()
            engine.close()


def test_two_engines_and_a_prompt_cache_share_what_others_leave(shared):
    """Others take at most the reserve between two looks: more would be taken before anybody can know."""
    found = []
    for others in (100, 100, 100, 150, 200, 250, 300, 350, 400, 450, 500, 550, *[580] * 2, *[200] * 20):
        shared.others = others
        found.append(shared.look())
        assert shared.above() <= 2
        assert sum(shared.sizes()) <= shared.taken() + shared.unit
        shared.work(length=100 if others == 200 else 30)
        assert shared.above() <= 2
    first, squeezed, last = found[0], found[13], found[-1]
    assert squeezed == [16, 16, 0]
    assert all(few < size for few, size in zip(squeezed, first, strict=True))
    assert all(few < size for few, size in zip(squeezed, last, strict=True))


def test_memory_that_mlx_and_malloc_keep_is_given_back():
    with on_cpu():
        begun = rss(os.getpid())
        held = [mx.full((2**12,), float(n)) for n in range(16_000)]
        mx.eval(held)
        most, kept = rss(os.getpid()), held[::1000]
        assert most - begun > 200
        del held
        memory.give_back()
    assert most - rss(os.getpid()) >= 0.95 * (most - begun - len(kept) / 64)
    assert mx.get_cache_memory() == 0


def test_idle_release_waits_while_requests_end_between_two_looks(engine, monkeypatch):
    found, unit = Memory(Governor(0, 2**40, idle_release=3), 4), engine.kv.pool.num_blocks
    for second in range(12):
        monkeypatch.setattr(memory, "seen", lambda now=second: Machine(float(now), 2**40))
        if second < 8:
            engine.generate("The block table", max_tokens=1)
        found.look(engine)
        assert (engine.kv.pool.num_blocks < unit) == (second >= 10), second


@pytest.mark.parametrize(
    ("made", "given", "longest"),
    [
        ("llama", [], 16 * (3 * MIB // (16 * 3 * 2 * 64 * 4) - 1)),
        ("llama", ["--eviction", "window", "--max-kv", "64"], 8192),
        ("mamba", [], None),
    ],
)
def test_length_of_requests_is_limited_by_the_least_size_only_where_blocks_limit_it(monkeypatch, made, given, longest):
    given = ["serve", "--model", "tiny", "--memory", "3MiB:12MiB", "--keep-free", "1MiB", "--max-running", "2", *given]
    args = build_parser().parse_args(given)
    settings = SimpleNamespace(chat_template=None, defaults={})
    with on_cpu():
        model, tokenizer = tiny.make() if made == "llama" else tiny_families.make(made)
        monkeypatch.setattr(loading, "load", lambda name: (model, tokenizer))
        engine = serve.make_engine(args, serve.engine_options(args, 16), settings, serve.bounds_of(args), [])
        assert engine.max_model_len == longest
        engine.close()
