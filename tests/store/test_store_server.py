"""`ServerStore` on a real Redis and a real Valkey server, and on servers that fail in every way."""

import os
import re
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from key_server import KINDS, KeyServer

from kvpool.store import BlockLayout, Layout, ServerStore
from kvpool.store import server as module
from kvpool.store.server import without_password
from kvpool.testing import stores as kit
from kvpool.testing.filled import NotApplicable

pytest.importorskip("redis", reason="needs the package redis (pip install 'kvpool[redis]')")
TIMEOUT = 0.3
LARGE = Layout((BlockLayout(4, 1 << 16, "full"),), "w")


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    running = KeyServer(request.param, str(tmp_path_factory.mktemp("server")))
    yield running
    running.stop()


@pytest.fixture
def opened(server):
    """A factory of stores on an empty server; all are closed at the end."""
    server.client.flushall()
    return lambda layout, place: ServerStore(server.url, layout, timeout=5.0)


@pytest.mark.parametrize("case", kit.CASES, ids=lambda case: case.__name__)
def test_server_passes_every_case_of_the_kit(opened, case):
    try:
        case(opened, "", True)
    except NotApplicable:
        pytest.fail("a server is shared: every case applies")


@pytest.mark.parametrize("kind", KINDS)
def test_server_restarted_without_its_data_is_a_miss_and_then_serves(tmp_path, kind):
    running = KeyServer(kind, str(tmp_path))
    store = ServerStore(running.url, kit.LAYOUT, timeout=TIMEOUT, pause=0.05)
    blocks = kit.LAYOUT.blocks(kit.prompt(1))[0]
    try:
        kit.stores(store, blocks)
        kit.loads(store, blocks, range(len(blocks)))
        running.stop()
        kit.loads(store, blocks, [])
        assert store.stats()["server"].errors == 1
        assert store.store(blocks, kit.content(kit.LAYOUT, blocks)) == 0  # it pauses: nothing is queued for nobody
        running.start()
        time.sleep(0.06)
        kit.loads(store, blocks, [])
        kit.stores(store, blocks)
        kit.loads(store, blocks, range(len(blocks)))
    finally:
        running.stop()


def test_value_with_any_byte_flipped_is_a_miss(server, opened):
    store = opened(kit.LAYOUT, "")
    blocks = kit.LAYOUT.blocks(kit.prompt(2))[2]
    client = server.client
    kit.stores(store, blocks[:1])
    (name,) = client.keys()
    value = client.get(name)
    covered = list(range(96 + 8)) + list(range(128, len(value)))  # the head's own checksum, and zeros, prove nothing
    for at in covered:
        client.set(name, value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :])
        kit.loads(store, blocks[:1], [])
    for wrong in (value[:-1], value + b"\0", value[:64], b"", value[1:]):
        client.set(name, wrong)
        kit.loads(store, blocks[:1], [])
    client.delete(name)
    client.lpush(name, value)
    kit.loads(store, blocks[:1], [])
    assert store.stats()["server"].damaged == len(covered) + 5


GARBAGE = {
    "nothing": [],
    "hangs up": None,
    "no protocol": [b"HTTP/1.1 400 Bad Request\r\n\r\n"] * 40,
    "an error": [b"-LOADING the dataset\r\n"] * 40,
    "no end": [b"$-1\r\n*99999999\r\n"] * 40,
    "a huge value": [b"*15\r\n$99999999999\r\n" + bytes(1 << 16)] * 40,
    "too many": [b"*3\r\n:1\r\n:1\r\n:1\r\n" * 40],
    "other types": [b"*15\r\n" + b":7\r\n" * 15] * 40,
    "nested": [b"*1\r\n" * 3000] * 10,
    "bytes that are none": [bytes(range(256)) * 16] * 10,
    "one byte now and then": [b"$", *[b"9"] * 200],
}


def answering(listener, answers, done):
    """A server that answers each call with the next of `answers`, whatever was asked; slowly, byte by byte."""
    listener.settimeout(0.05)
    while not done.is_set():
        with suppress(OSError):  # nobody has called yet, or who did has hung up
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(0.05)
                for answer in answers or ():
                    with suppress(TimeoutError):
                        if not connection.recv(1 << 20):
                            break
                    connection.sendall(answer)
                while answers is not None and not done.wait(0.02):
                    with suppress(TimeoutError):
                        if not connection.recv(1 << 20):
                            break


@pytest.mark.parametrize("kind", GARBAGE)
def test_server_answering_garbage_is_a_miss_within_the_timeout(kind):
    listener, done = socket.create_server(("127.0.0.1", 0)), threading.Event()
    thread = threading.Thread(target=answering, args=(listener, GARBAGE[kind], done))
    thread.start()
    store = ServerStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", kit.LAYOUT, timeout=TIMEOUT, pause=0.01)
    blocks = kit.LAYOUT.blocks(kit.prompt(3))[0]
    try:
        for call in (lambda: kit.loads(store, blocks, []), lambda: store.lookup(blocks)):
            begin = time.monotonic()
            call()
            assert time.monotonic() - begin < TIMEOUT + 10  # a hang: the clock of a busy machine is not judged
            time.sleep(0.02)
        store.store(blocks[:2], kit.content(kit.LAYOUT, blocks[:2]))
        assert store.drain(60.0)
    finally:
        done.set()
        store.close()
        thread.join()
        listener.close()


def test_server_that_refuses_to_write_is_read_on(opened, server, caplog):
    store = opened(kit.LAYOUT, "")
    kept, refused = (kit.LAYOUT.blocks(kit.prompt(seed))[0] for seed in (1, 2))
    kit.stores(store, kept)
    server.client.config_set("maxmemory", 1)  # and the policy is noeviction
    try:
        store.store(refused, kit.content(kit.LAYOUT, refused))
        assert store.drain(60) and store.is_paused
        for _ in range(3):
            kit.loads(store, kept, range(len(kept)))
            assert store.lookup(kept).all()
        stats = store.stats()["server"]
        assert (stats.errors, stats.dropped, stats.hits) == (1, len(refused), 3 * len(kept))
        (told,) = (each.getMessage() for each in caplog.records)
        assert "writing" in told and "OutOfMemoryError" in told
    finally:
        server.client.config_set("maxmemory", 0)


def test_name_that_leads_to_another_server_is_followed_when_the_old_one_is_a_replica(tmp_path):
    (tmp_path / "new").mkdir()
    servers, place = [KeyServer("redis", str(folder)) for folder in (tmp_path, tmp_path / "new")], tmp_path / "name"
    place.symlink_to(servers[0].socket)
    store = ServerStore(f"unix://{place}", kit.LAYOUT, timeout=5.0, pause=1e-6)
    blocks = kit.LAYOUT.blocks(kit.prompt(1))[0]
    try:
        kit.stores(store, blocks[:1])
        place.unlink()
        place.symlink_to(servers[1].socket)
        servers[0].client.replicaof("127.0.0.1", 1)
        for number in range(1, 4):
            store.store(blocks[[number]], kit.content(kit.LAYOUT, blocks[[number]]))
            assert store.drain(60)
        assert servers[1].client.dbsize() == 2 and store.stats()["server"].dropped == 1
    finally:
        store.close()
        for each in servers:
            each.stop()


def test_server_that_fails_is_in_the_log_once_until_it_works(tmp_path, caplog):
    path, blocks = tmp_path / "server.sock", kit.LAYOUT.blocks(kit.prompt(4))[0]
    store = ServerStore(f"unix://:SECRET@{path}", kit.LAYOUT, timeout=TIMEOUT, pause=1e-6)
    for _ in range(3):
        assert not store.lookup(blocks).any()
    (told,) = (each.getMessage() for each in caplog.records)
    assert f"reading on unix://{path} fails: ConnectionError" in told
    assert store._ask(lambda client: [1])  # as when it has answered
    assert not store.lookup(blocks).any()
    assert len(caplog.records) == 2


def test_server_that_is_not_there_costs_one_try_until_the_pause_ends(tmp_path):
    store = ServerStore(f"unix://{tmp_path}/none.sock", kit.LAYOUT, timeout=TIMEOUT, pause=3000.0)
    blocks = kit.LAYOUT.blocks(kit.prompt(4))[0]
    for _ in range(5):
        kit.loads(store, blocks, [])
        assert not store.lookup(blocks).any()
        assert store.store(blocks, kit.content(kit.LAYOUT, blocks)) == 0
    stats = store.stats()["server"]
    assert (stats.errors, stats.misses, stats.dropped) == (1, 5 * len(blocks), 5 * len(blocks))


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        ("http://host", {}, ValueError),
        ("redis://host:port", {}, ValueError),
        (7, {}, ValueError),
        ("redis://host", {"timeout": 0}, ValueError),
        ("redis://host", {"timeout": "1"}, TypeError),
        ("redis://host", {"pause": float("nan")}, ValueError),
        ("redis://host", {"expire": 0}, ValueError),
        ("redis://host", {"queue_nbytes": True}, TypeError),
    ],
)
def test_server_with_wrong_arguments_is_refused_at_once(url, options, error):
    with pytest.raises(error, match=r"^\[ServerStore\] "):
        ServerStore(url, kit.LAYOUT, **options)


SECRETS = {
    "redis://:SECRET@host": "redis://host",
    "rediss://user:SECRET@host:1/2?protocol=3": "rediss://host:1/2",
    "redis://SECRET@[::1]:1/0": "redis://[::1]:1/0",
    "redis://:SE@CRET@host": "redis://host",
    "redis://host?password=SECRET": "redis://host",
    "unix://:SECRET@/a/b.sock?password=SECRET": "unix:///a/b.sock",
    "http://:SECRET@host": "http://host",
    "redis://:SECRET@host:port": "...",
    "redis://:SE/CRET@host": "...",
    "redis://:SE?CRET@host": "...",
    "redis://:SE#CRET@host": "...",
    "redis://user:SECRET": "...",
    "redis://:SECRET": "...",
    "redis://host?password=SE@CRET": "...",
    "redis://host/SECRET@host": "...",
    "redis://host?db=SECRET": "redis://host",
    "redis://host?socket_timeout=SECRET": "redis://host",
}


@pytest.mark.parametrize("url", SECRETS)
def test_password_of_a_server_is_not_shown(url):
    assert without_password(url) == SECRETS[url]
    try:
        store = ServerStore(url, kit.LAYOUT, timeout=TIMEOUT)
    except ValueError as error:
        shown = f"{error} {error.__cause__}"
    else:
        shown = repr(store)
    assert SECRETS[url] in shown and not re.search("SE|CRET", shown)


def test_blocks_are_sent_and_loaded_many_at_a_time(opened, monkeypatch):
    layout = Layout((BlockLayout(4, 4096, "full"),), "w")
    store, deadlines = opened(layout, ""), []
    blocks = layout.blocks(kit.prompt(6, 8000))[0]
    monkeypatch.setattr(module, "Timer", lambda *given: deadlines.append(given) or threading.Timer(*given))
    rows = kit.stores(store, blocks)
    assert len(deadlines) <= 1 + rows.nbytes / 2**20, "a pipeline has a deadline, and takes up to 1 MiB"
    deadlines.clear()
    kit.loads(store, blocks, range(2000))
    assert store.lookup(blocks).all() and len(deadlines) == 2
    stats = store.stats()["server"]
    assert (stats.stored, stats.dropped, stats.errors) == (2000, 0, 0)
    assert stats.written_nbytes == 2000 * (128 + 64 + 4096)


def before_each_pipeline(monkeypatch, store, call):
    """Call ``call(pipeline)`` before the store executes one that sends."""
    begin = store._sender.pipeline

    def pipeline(**options):
        made = begin(**options)
        run = made.execute
        made.execute = lambda **how: call(made) or run(**how)
        return made

    monkeypatch.setattr(store._sender, "pipeline", pipeline)


def test_blocks_that_a_server_refuses_of_a_pipeline_are_the_dropped_ones(opened, server, monkeypatch):
    store, taken = opened(kit.LAYOUT, ""), []
    blocks = kit.LAYOUT.blocks(kit.prompt(7))[0]

    def odd_ones_fail(pipeline):
        taken.append(1)
        bad = (("SET", "name"), {})  # an error of the server
        pipeline.command_stack[1::2] = [bad] * (len(pipeline.command_stack) // 2)

    before_each_pipeline(monkeypatch, store, odd_ones_fail)
    store.store(blocks, kit.content(kit.LAYOUT, blocks))
    assert store.drain(60) and len(taken) == 1 and store.is_paused
    kit.loads(store, blocks, range(0, len(blocks), 2))
    stats = store.stats()["server"]
    assert (stats.dropped, stats.errors) == (len(blocks) // 2, 1)


def test_batch_that_a_slow_link_does_not_carry_is_followed_by_smaller_ones(opened, server, monkeypatch):
    """A link that carries 8 blocks within the timeout; and later any number."""
    store = ServerStore(server.url, LARGE, timeout=1.0, pause=1e-6)
    blocks, sent, most = LARGE.blocks(kit.prompt(8, 400))[0], [], [8]

    def slow(pipeline):
        sent.append(len(pipeline.command_stack))
        if sent[-1] > most[0]:
            time.sleep(1.0)
            raise TimeoutError

    before_each_pipeline(monkeypatch, store, slow)
    for _ in range(20):
        store.store(blocks, kit.content(LARGE, blocks))
        assert store.drain(60)
        if store.lookup(blocks).all():
            break
    assert store.lookup(blocks).all() and max(sent) > 8 and store.stats()["server"].errors <= 10
    most[0], largest = 1000, max(sent)
    for _ in range(20):
        store.store(blocks, kit.content(LARGE, blocks))
        assert store.drain(60)
    assert max(sent[-3:]) == largest == 16, "a MiB again"


@pytest.mark.parametrize(("tokens", "nbytes"), [(4, 512 << 20), (2**20 + 1, 64)])
def test_block_that_is_too_large_for_a_server_is_refused_at_once(tokens, nbytes):
    with pytest.raises(ValueError, match=r"^\[ServerStore\] .*group 0 .*, the limit is \d+$"):
        ServerStore("redis://host", Layout((BlockLayout(tokens, nbytes, "full"),), "w"))


def test_server_store_is_bounded_by_its_queue(opened, server):
    store = ServerStore(server.url, kit.LAYOUT, timeout=30.0, queue_nbytes=3000)
    blocks = kit.LAYOUT.blocks(kit.prompt(5))[0]
    os.kill(server.process.pid, 19)  # SIGSTOP: it does not answer
    try:
        took = store.store(blocks, kit.content(kit.LAYOUT, blocks))
        assert took == 3000 // 700 and store.stats()["server"].dropped == len(blocks) - took
    finally:
        os.kill(server.process.pid, 18)
    assert store.drain(60.0)
    assert np.flatnonzero(kit.loads(store, blocks)).tolist() == list(range(took))
