"""Where texts become tokens: whose turn it is, and what a hang-up ends."""

import asyncio
import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time

import pytest
from anyio import to_process
from mlx_lm.tokenizer_utils import TokenizerWrapper
from server_process import Server
from small_tokenizers import TEXT, tokenizer_of
from test_serving_limits import HELD, asking, settled

from kvpool.adapters.mlx_lm import tiny
from kvpool.serving import texts as serving
from kvpool.serving.texts import Processes, Threads, Turns, shared

TOKENIZER = TokenizerWrapper(tiny.byte_tokenizer())
COUNT = "/v1/messages/count_tokens"
WEIGHTS = {"alice": 1.0, "bob": 3.0, "carol": 0.5}


def in_a_loop(test):
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **options):
        asyncio.run(test(*arguments, **options))

    return run


async def worked(turns, tenant, cost, running, log):
    """Hold a place for some turns of the loop."""

    async def work():
        running.append(tenant)
        log.append((tenant, cost, list(running)))
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(tenant)

    await turns.hold(tenant, cost, work)


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_wait_get_their_shares_and_no_more_places_than_there_are(seed):
    """While all of them wait, tenants have got the same for their weights, up to a call of one on each place."""
    rng = random.Random(seed)
    places = rng.randint(1, 3)
    most = rng.randint(1, places)
    jobs = [(rng.choice(list(WEIGHTS)), rng.randint(1, 50)) for _ in range(200)]
    log = []

    async def run():
        turns, running = Turns(places, most, WEIGHTS), []
        await asyncio.gather(*(worked(turns, *job, running, log) for job in jobs))

    asyncio.run(run())
    assert sorted(entry[:2] for entry in log) == sorted(jobs)
    assert max(len(running) for *_, running in log) == places
    assert max(running.count(tenant) for *_, running in log for tenant in WEIGHTS) == most
    left, got = {tenant: sum(name == tenant for name, _ in jobs) for tenant in WEIGHTS}, dict.fromkeys(WEIGHTS, 0.0)
    for tenant, cost, _ in log:
        got[tenant] += cost / WEIGHTS[tenant]
        left[tenant] -= 1
        if most == places and min(left.values()) > 0:
            assert max(got.values()) - min(got.values()) <= places * 50 / min(WEIGHTS.values()), (got, left)


def test_tenant_that_comes_late_goes_before_a_flood_and_saves_nothing_up():
    order = []

    def one(turns, tenant, cost=1.0):
        async def work():
            order.append(tenant)

        return turns.hold(tenant, cost, work)

    async def run():
        turns = Turns(1, 1, {})
        await asyncio.gather(*(one(turns, "alice", 1000.0) for _ in range(5)))
        flood = [asyncio.create_task(one(turns, "alice", 1000.0)) for _ in range(5)]
        await asyncio.sleep(0)
        late = [asyncio.create_task(one(turns, "bob", 900.0)) for _ in range(5)]
        await asyncio.gather(*flood, *late)

    asyncio.run(run())
    assert "bob" in order[5:8], "he does not wait for the flood"
    assert order[5:12].count("bob") <= 4, "what he did not use before is not his now"


@in_a_loop
async def test_calls_that_are_cancelled_before_their_turn_do_not_count():
    turns, running, log = Turns(1, 1, {}), [], []
    flood = [asyncio.create_task(worked(turns, "alice", cost, running, log)) for cost in (1, 1000, 1000)]
    await asyncio.sleep(0)
    for one in flood[1:]:
        one.cancel()
    await asyncio.wait(flood[1:])
    await asyncio.gather(*(worked(turns, *job, running, log) for job in (("bob", 9), ("bob", 9), ("alice", 9))))
    assert [tenant for tenant, *_ in log] == ["alice", "bob", "alice", "bob"]


@pytest.mark.parametrize("seed", range(20))
@in_a_loop
async def test_places_come_back_whenever_a_request_is_cancelled(seed):
    rng = random.Random(seed)
    turns, running, log = Turns(2, 1, {}), [], []
    tasks = [asyncio.create_task(worked(turns, rng.choice("ab"), rng.randint(1, 9), running, log)) for _ in range(60)]
    while not all(task.done() for task in tasks):
        if rng.random() < 0.7:
            rng.choice(tasks).cancel()
        await asyncio.sleep(0)
    both = asyncio.Barrier(2)
    async with asyncio.timeout(60):
        await asyncio.gather(*(turns.hold(tenant, 1, both.wait) for tenant in "ab"))
    assert not running


@in_a_loop
async def test_thread_keeps_its_place_until_the_call_ends():
    go, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait()

    place = Threads(1, 1, {})
    first = asyncio.create_task(place.run(None, 1, slow))
    await asyncio.to_thread(begun.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(place.run(None, 1, str.upper, "a"))
    await asyncio.sleep(0.05)
    assert not second.done()
    go.set()
    assert await second == "A"
    with pytest.raises(ZeroDivisionError):
        await place.run(None, 1, divmod, 1, 0)
    assert await place.run(None, 1, str.upper, "b") == "B"


def texts(seed, count=40):
    """Texts that are hard to tokenize in parts: spaces, marks, added tokens, characters of several bytes."""
    rng = random.Random(seed)
    parts = [
        *TEXT,
        "<end>",
        "<tool_call>",
        "[INST]",
        "call",
        "<mask>",
        " " * 40,
        "\n",
        "e\u0301",
        "\u212a",
        "K",
        "the ",
    ]
    parts += ["\u0390", "\u03b9\u0308\u0301", "\U0001f600", "\x00", "<0x41>", "▁", "THE", "aaaa"]
    return ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(count)]


def processes(tokenizer, places):
    """Processes, of which a tenant may have one."""
    return Processes(shared(tokenizer), places, 1, {})


@pytest.mark.parametrize("kind", ["byte pairs", "pieces", "words"])
@in_a_loop
async def test_process_makes_the_tokens_that_the_tokenizer_makes(kind):
    tokenizer = tokenizer_of(kind)
    place = processes(tokenizer, 1)
    for text in [*texts(kind), " ".join(texts(kind)) * 50, "a"]:
        for special in (True, False):
            found = await place.run(None, 1, text, special)
            assert found.tolist() == tokenizer.encode(text, add_special_tokens=special)


def started():
    """The processes that this event loop has."""
    return set(to_process._process_pool_workers.get(()))


async def until(is_so):
    """Wait for something that other processes do."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("patience", [0.01, 3600])
def test_process_whose_text_nobody_wants_is_killed_unless_it_ends_it_soon_and_others_go_on(monkeypatch, patience):
    monkeypatch.setattr(serving, "LOADS", patience)

    async def run():
        place = processes(TOKENIZER, 2)
        assert (await place.run("a", 1, "one", True)).tolist() == TOKENIZER.encode("one")
        (first,) = started()
        job = asyncio.create_task(place.run("a", 1, "a " * 1_000_000, True))
        waits = asyncio.create_task(place.run("a", 1, "two", True))
        await asyncio.sleep(0.2)
        first.send_signal(signal.SIGSTOP)  # it has not ended its text when nobody wants it any more
        assert (await place.run("b", 1, "three", True)).tolist() == TOKENIZER.encode("three")
        assert not job.done() and not waits.done(), "b has a process of its own"
        job.cancel()
        if patience == 3600:
            await asyncio.sleep(0.1)
            first.send_signal(signal.SIGCONT)
        assert (await waits).tolist() == TOKENIZER.encode("two")
        assert (first in started()) == (patience == 3600)
        return first

    assert asyncio.run(asyncio.wait_for(run(), 60)).returncode is not None


@in_a_loop
async def test_process_whose_text_nobody_wants_loads_on_without_it(monkeypatch):
    made, start = [], to_process.open_process

    async def noted(*arguments, **options):
        made.append(await start(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(to_process, "open_process", noted)
    monkeypatch.setattr(serving, "LOADS", 0)
    place = processes(TOKENIZER, 1)
    job = asyncio.create_task(place.run("a", 1, "a " * 1_000_000, True))
    await until(lambda: made)
    job.cancel()
    assert (await place.run("b", 1, "two", True)).tolist() == TOKENIZER.encode("two")
    assert len(made) == 1


@in_a_loop
async def test_process_that_dies_or_does_not_start_fails_no_later_text(monkeypatch):
    async def fails(*arguments, **options):
        raise OSError(24, "Too many open files")

    place = processes(TOKENIZER, 1)
    with monkeypatch.context() as patch:
        patch.setattr(to_process, "open_process", fails)
        with pytest.raises(OSError, match="Too many open files"):
            await place.run("a", 1, "one", True)
    for text in "ab":
        assert (await place.run("a", 1, text, True)).tolist() == TOKENIZER.encode(text)
        (process,) = started()
        process.kill()  # as the system does
        await process.wait()
    job = asyncio.create_task(place.run("a", 1, "a " * 2_000_000, True))
    await until(lambda: started() - {process})
    for process in started():
        process.kill()
    with pytest.raises(ChildProcessError):
        await job
    assert (await place.run("a", 1, "b", True)).tolist() == TOKENIZER.encode("b")


@in_a_loop
async def test_text_without_tokens_is_read_by_the_tokenizer_that_is_there(monkeypatch):
    place = processes(TOKENIZER, 1)
    assert (await place.run("a", 1, "one", False)).size
    monkeypatch.setattr(place, "_how", (b"no tokenizer", False))
    assert (await place.run("a", 1, "", False)).tolist() == []
    assert "PYTHONSAFEPATH" not in os.environ  # but while a process may start


def test_tokenizer_with_code_of_its_own_is_not_copied():
    from transformers import PreTrainedTokenizerFast

    wrapper = tokenizer_of("pieces")

    class Own(PreTrainedTokenizerFast):
        def encode(self, text, **options):
            return super().encode(text.lower(), **options)

    wrapper._tokenizer.__class__ = Own
    assert shared(wrapper) is None and shared(object()) is None


@pytest.mark.long
def test_short_texts_of_a_tenant_hold_no_other_one_up(tmp_path):
    keys, body = ("--api-key", "one", "--api-key", "two"), {"prompt": "slow", "max_tokens": 1}
    path, server = "/v1/completions", Server(*keys, patch=HELD, GO=str(tmp_path / "go"))
    with server, asking(server, body, path, key="one"), asking(server, body, path, key="one"):
        while server.errors.count(b"reads slow\n") < 1:
            time.sleep(0.01)
        settled(server)
        assert server.post(path, body | {"prompt": "quick"}, **{"x-api-key": "two"})[0] == 200
        (tmp_path / "go").touch()


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def children(server):
    """Ids of the processes of a server, and the seconds of CPU time that they used."""
    pid, found = server.process.pid, {}
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        for child in file.read().split():
            with contextlib.suppress(OSError), open(f"/proc/{child}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
                found[child] = (int(fields[11]) + int(fields[12])) / 100
    return found


def test_module_in_the_folder_of_the_server_is_not_taken_for_one_of_python(monkeypatch, tmp_path):
    checkout = os.getcwd()
    monkeypatch.chdir(tmp_path)
    with Server(PYTHONPATH=checkout) as server:
        (tmp_path / "token.py").write_text("raise SystemExit")
        status, answer = server.post("/tokenize", {"prompt": "a" * 100_000})
    assert status == 200 and answer["count"] == 100_000, answer


def said(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture(scope="module")
def server():
    with Server("--api-key", "one", "--api-key", "two", "--max-waiting", "64") as one:
        yield one


@on_linux
def test_long_texts_of_a_tenant_hold_no_other_one_up_and_end_with_their_clients(server):
    huge, long, sent = said("a " * 1_950_000), said("a b c " * 11_000), []
    around = server.post(COUNT, said("a"), **{"x-api-key": "two"})[1]["input_tokens"] - 1
    due = 200, {"input_tokens": 66_000 + around}
    assert server.post(COUNT, long, **{"x-api-key": "two"}) == due
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(asking(server, huge, COUNT, key="one"))
            connection.setblocking(False)
            sent.append(connection)
        for _ in range(2):
            assert server.post(COUNT, long, **{"x-api-key": "two"}) == due
        before = children(server)
        assert len(before) == 2
        for _ in range(3000):  # until one reads, which takes seconds of CPU time
            if max(used - before[child] for child, used in children(server).items()) > 0.5:
                break
            time.sleep(0.01)
        for connection in sent:
            with pytest.raises(BlockingIOError):
                connection.recv(1)
    for _ in range(3000):  # a process is killed in the middle of a text
        if len(children(server)) == 1:
            break
        time.sleep(0.01)
    assert len(before.keys() - children(server).keys()) == 1
    assert server.post(COUNT, long, **{"x-api-key": "one"}) == due
    assert sum(children(server).values()) < 60, "nobody reads on what was sent"
