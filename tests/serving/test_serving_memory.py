"""``kvpool serve --memory auto`` beside a process that takes memory; and what `Memory` does to an engine.

``KVPOOL_PICTURE=docs/memory.png pytest -m long`` on this file draws what happened.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_models import on_cpu
from server_process import Server

from benchmarks import picture
from kvpool import governor
from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.cli import main
from kvpool.config import available_memory_nbytes
from kvpool.governor import Decision, Governor
from kvpool.serving import memory
from kvpool.serving.memory import Memory

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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--memory", "2GiB:1GiB"], "--memory 2GiB:1GiB: 2GiB is above 1GiB"),
        (["--memory", "1GiB:"], "is not a size"),
        (["--memory", ":1GiB"], "is not a size"),
        (["--memory", "few:1GiB"], "--memory few: 'few' is not a size"),
        (["--memory=-1:5"], "is not a size"),
        (["--memory", "1GiB:2GiB", "--num-blocks", "9"], "--memory and --num-blocks exclude each other"),
        (["--idle-release", "60"], "--idle-release 60: needs --memory"),
        (["--memory", "auto", "--idle-release", "0"], "--idle-release 0: out of range"),
        (["--memory", "auto", "--idle-release", "soon"], "--idle-release soon: not a number"),
        (["--memory", "1GiB", "--keep-free", "1GiB"], "--keep-free 1GiB: needs --memory auto or MIN:MAX"),
        (["--memory", "auto", "--keep-free", "1000TiB"], "--keep-free 1000TiB: the machine has"),
        (["--memory", "auto", "--keep-free", "lots"], "--keep-free lots: 'lots' is not a size"),
    ],
)
def test_bounds_that_are_none_are_refused_before_the_model_is_loaded(arguments, text, capsys):
    assert main(["serve", "--model", "/nowhere", *arguments]) == 2
    assert text in capsys.readouterr().err
