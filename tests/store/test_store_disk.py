"""`DiskStore`: restarts, the quota, the queue, clocks."""

import errno
import fcntl
import os
import shutil
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.store import BlockLayout, DiskStore, Layout, disk, outbox
from kvpool.store import segment_format as form
from kvpool.store.disk import Folder
from kvpool.store.segment_format import Index
from kvpool.testing import stores as kit

LAYOUT = Layout((BlockLayout(4, 4000, "full"),), "w")
RECORD = 128 + 64 + 4032
SEGMENT = 5 * RECORD + 64 + 256  # four records and a footer, or five


def opened(path, max_nbytes=1 << 24, **options):
    store = DiskStore(str(path), LAYOUT, max_nbytes, **{"segment_nbytes": SEGMENT, "refresh_seconds": 0.02, **options})
    assert store.ready.wait(60)
    return store


def held(path):
    """Bytes of the segments in a directory."""
    return sum(file.stat().st_size for file in path.glob("*.kvpool*"))


def blocks_of(seed, count=20):
    return LAYOUT.blocks(kit.prompt(seed, 4 * count))[0]


def test_quota_is_kept_at_every_moment_and_the_newest_stay(tmp_path):
    most = 6 * SEGMENT
    store = opened(tmp_path / "store", most)
    for seed in range(12):
        kit.stores(store, blocks_of(seed, 10))
        assert held(tmp_path / "store") <= most
    kit.loads(store, blocks_of(11, 10), range(10))
    stats = store.stats()["disk"]
    assert stats.evicted > 0 and stats.blocks + stats.evicted == stats.stored == 120
    assert len(store.refused) == 0
    store.close()
    assert 4 * SEGMENT < held(tmp_path / "store") <= most
    smaller = opened(tmp_path / "store", 3 * SEGMENT)
    assert held(tmp_path / "store") <= 3 * SEGMENT
    kit.loads(smaller, blocks_of(11, 10), range(10))


def test_segment_in_use_stays_longer_than_others(tmp_path):
    store = opened(tmp_path / "store", 8 * SEGMENT)
    kit.stores(store, blocks_of(0, 4))
    for seed in range(1, 25):
        kit.stores(store, blocks_of(seed, 4))
        if seed % 2:
            kit.loads(store, blocks_of(0, 4), range(4))
        else:
            store.touch(blocks_of(0, 4))
    assert store.stats()["disk"].evicted > 50 and not kit.loads(store, blocks_of(3, 4)).any()
    kit.loads(store, blocks_of(0, 4), range(4))


def test_two_stores_share_the_quota_and_forget_what_the_other_deleted(tmp_path):
    most = 8 * SEGMENT
    one, two = opened(tmp_path / "store", most), opened(tmp_path / "store", most)
    kit.stores(two, blocks_of(100))
    for seed in range(8):
        for store in (one, two):
            kit.stores(store, blocks_of(seed if store is one else seed + 50))
            assert held(tmp_path / "store") <= most
    assert not kit.loads(one, blocks_of(100)).any() and not kit.loads(two, blocks_of(100)).any()


def test_amplification_of_writes_is_small(tmp_path):
    large = Layout((BlockLayout(16, 65536, "full"),), "w")
    store = DiskStore(str(tmp_path / "store"), large, 1 << 28, segment_nbytes=1 << 22, refresh_seconds=float("inf"))
    for seed in range(10):
        kit.stores(store, large.blocks(kit.prompt(seed, 160))[0])
    store.close()
    stats = store.stats()["disk"]
    assert stats.stored_nbytes == 100 * 65536
    assert stats.stored_nbytes < stats.written_nbytes <= 1.05 * stats.stored_nbytes
    assert held(tmp_path / "store") == stats.written_nbytes


def test_error_of_the_writer_that_nobody_foresaw_loses_the_blocks_of_one_call(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk, "_BATCH_NBYTES", 4000)
    store, blocks, write = opened(tmp_path / "store"), blocks_of(1), os.pwritev
    failures = iter([RuntimeError("planted")])

    def failing(*given):
        if len(given[1]) == 3 and (failure := next(failures, None)):
            raise failure
        return write(*given)

    monkeypatch.setattr(os, "pwritev", failing)
    kit.stores(store, blocks)
    assert "planted" in caplog.text
    kit.loads(store, blocks, range(1, 20))


def test_small_blocks_are_written_many_in_a_call(tmp_path, monkeypatch):
    layout, calls, write = Layout((BlockLayout(1, 50, "full"),), "w"), [], os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: calls.append(len(parts)) or write(fd, parts, at))
    with closing(DiskStore(str(tmp_path / "store"), layout, 1 << 26)) as store:
        blocks = layout.blocks(np.arange(1000))[0]
        kit.stores(store, blocks)
        assert len(calls) <= 5 and max(calls) <= 1024  # IOV_MAX
        kit.loads(store, blocks, range(1000))


def test_queue_that_is_full_drops_and_does_not_wait(tmp_path, monkeypatch):
    store = opened(tmp_path / "store", queue_nbytes=4 * 4000)
    write, blocks = os.pwritev, blocks_of(1)
    go = threading.Event()
    monkeypatch.setattr(os, "pwritev", lambda *args: go.wait(60) and write(*args))
    try:
        took = store.store(blocks, kit.content(LAYOUT, blocks))
        assert took == 4 and store.stats()["disk"].queued_nbytes == 4 * 4000
        assert store.stats()["disk"].dropped == 16
        assert not store.drain(0.05)
    finally:
        go.set()
    assert store.drain(60)
    kit.loads(store, blocks, range(4))


def test_store_that_was_closed_too_early_has_nothing_and_counts_what_it_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(disk, "_BATCH_NBYTES", 4000)
    other = opened(tmp_path / "store")
    kit.stores(other, blocks_of(1))
    store, write, go = opened(tmp_path / "store"), os.pwritev, threading.Event()
    monkeypatch.setattr(os, "pwritev", lambda *given: go.wait(60) and write(*given))
    assert store.store(blocks_of(2), kit.content(LAYOUT, blocks_of(2))) == 20
    try:
        store.close()
        stats = store.stats()["disk"]
        assert stats.dropped == 19 and stats.queued_nbytes == 4000  # one is being written
    finally:
        go.set()
    store._outbox._thread.join(60)
    for seed in (1, 2):
        assert not store.lookup(blocks_of(seed)).any()
        kit.loads(store, blocks_of(seed), [])
    assert store.drain(1.0) and store.stats()["disk"].queued_nbytes == store.stats()["disk"].blocks == 0


def test_look_that_ends_after_a_close_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_CLOSE_SECONDS", 0.1)
    other = opened(tmp_path / "store")
    kit.stores(other, blocks_of(1))
    read, begun, go = form.read_header, threading.Event(), threading.Event()
    monkeypatch.setattr(form, "read_header", lambda fd: begun.set() or (go.wait(60) and read(fd)))
    store = DiskStore(str(tmp_path / "store"), LAYOUT, 1 << 24, segment_nbytes=SEGMENT)
    assert begun.wait(60)
    store.close()
    go.set()
    store._outbox._thread.join(60)
    assert store.ready.is_set() and not store.lookup(blocks_of(1)).any()
    kit.loads(store, blocks_of(1), [])


def test_block_that_could_not_be_copied_is_taken_later(tmp_path, monkeypatch):
    store, blocks = opened(tmp_path / "store", queue_nbytes=20 * 4000), blocks_of(1)

    def failing(*given):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "Waiting", failing)
        with pytest.raises(MemoryError, match="planted"):
            store.store(blocks, kit.content(LAYOUT, blocks))
    assert store.drain(1.0) and store.stats()["disk"].queued_nbytes == 0
    assert store.store(blocks, kit.content(LAYOUT, blocks)) == 20 and store.drain(60)
    kit.loads(store, blocks, range(20))


def test_block_whose_copy_is_made_while_the_store_closes_is_written(tmp_path, monkeypatch):
    store, blocks, heads = opened(tmp_path / "store"), blocks_of(1, 1), outbox.expected_heads
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(outbox, "expected_heads", lambda *given: (begun.set(), go.wait(60), heads(*given))[-1])
    both = [
        threading.Thread(target=store.store, args=[blocks, kit.content(LAYOUT, blocks)]),
        threading.Thread(target=store.close),
    ]
    both[0].start()
    assert begun.wait(60)
    both[1].start()
    both[1].join(0.1)
    go.set()
    for thread in both:
        thread.join(60)
    assert store.stats()["disk"].queued_nbytes == 0
    kit.loads(opened(tmp_path / "store"), blocks, [0])


def test_segment_of_a_dead_writer_is_taken_over_in_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_PAUSE_SECONDS", 3600.0)
    dead = [opened(tmp_path / "store", 2 * SEGMENT, refresh_seconds=3600.0) for _ in range(2)]
    for seed, writer in enumerate(dead):
        kit.stores(writer, blocks_of(seed, 1))
    store = opened(tmp_path / "store", 2 * SEGMENT)
    store.store(blocks_of(3, 1), kit.content(LAYOUT, blocks_of(3, 1)))
    assert store.drain(60) and store.is_paused
    for writer in dead:
        fcntl.flock(writer._growing.fd, fcntl.LOCK_UN)
    end = time.monotonic() + 60
    while list((tmp_path / "store").glob("*.kvpool-open")) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list((tmp_path / "store").glob("*.kvpool-open"))


def test_segment_that_was_deleted_is_closed_once_though_its_close_fails(tmp_path, monkeypatch):
    store, closed, close = opened(tmp_path / "store"), [], os.close
    kit.stores(store, blocks_of(1, 1))
    held_open = store._growing.fd

    def failing(fd):
        close(fd)
        if fd == held_open:
            closed.append(fd)
            raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, "close", failing)
    for file in (tmp_path / "store").glob("*.kvpool*"):
        file.unlink()
    end = time.monotonic() + 60
    while store.lookup(blocks_of(1, 1)).any() and time.monotonic() < end:
        time.sleep(0.01)
    monkeypatch.undo()
    kit.stores(store, blocks_of(2))
    kit.loads(store, blocks_of(2), range(20))
    assert len(closed) == 1


WIDE = 1 << 40


@pytest.mark.parametrize(
    ("group", "options", "error", "said"),
    [
        (None, {"max_nbytes": 0}, ValueError, "max_nbytes is 0"),
        (None, {"max_nbytes": "100GB"}, TypeError, "max_nbytes must be an int, got str"),
        (None, {"max_nbytes": True}, TypeError, "max_nbytes must be an int, got bool"),
        (None, {"max_nbytes": 1e9}, TypeError, "max_nbytes must be an int, got float"),
        (None, {"max_nbytes": 5000}, ValueError, "max_nbytes is 5000, the least for this layout is"),
        (None, {"queue_nbytes": 3999}, ValueError, "queue_nbytes is 3999, the least for this layout is 4000"),
        (None, {"segment_nbytes": 4000}, ValueError, "segment_nbytes is 4000, the least"),
        (None, {"segment_nbytes": 1 << 24}, ValueError, "max_nbytes is 16777216, the least"),
        (None, {"max_nbytes": WIDE, "segment_nbytes": (1 << 38) + 1}, ValueError, r"segment_.*, the limit is \d+$"),
        ((4, (1 << 31) - 4096), {"max_nbytes": WIDE}, ValueError, r"record of group 0.*, the limit is \d+$"),
        (((1 << 20) + 1, 4000), {"max_nbytes": WIDE}, ValueError, r"tokens.*, the limit is \d+$"),
    ],
)
def test_size_that_is_none_or_too_large_is_refused_at_the_start(tmp_path, group, options, error, said):
    layout = LAYOUT if group is None else Layout((BlockLayout(*group, "full"),), "w")
    with pytest.raises(error, match=rf"^\[DiskStore\] .*{said}"):
        DiskStore(str(tmp_path / "store"), layout, **{"max_nbytes": 1 << 24} | options)
    assert not (tmp_path / "store").exists()


def test_closed_and_refused_stores_keep_no_file_open(tmp_path, files_open, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: 1 // 0)  # the system has no thread more
        with pytest.raises(ZeroDivisionError):
            opened(tmp_path / "store")
    for seed in range(5):
        store = opened(tmp_path / "store")
        kit.stores(store, blocks_of(seed))
        kit.loads(store, blocks_of(seed), range(20))
        with pytest.raises(ValueError):
            DiskStore(str(tmp_path / "store"), kit.LAYOUT, 1 << 24)
        assert files_open()
        store.close()
    assert files_open() == []


def test_index_finds_what_a_dict_finds_in_16_bytes_each():
    rng, index, known = np.random.default_rng(1), Index(), {}
    names = rng.permutation(np.arange(1, 6001)).astype(np.uint64)
    for segment in range(60):
        entries = np.zeros(50, [("name", "<u8"), ("offset", "<u8")])
        entries["name"], entries["offset"] = names[segment * 50 : segment * 50 + 50], np.arange(50) * 64
        for name, offset in entries.tolist() if segment % 3 else ():
            index.add(name, segment, offset)
        if segment % 3 != 1:  # sealed; the others go on growing
            index.merge({segment: entries})
        known.update({name: segment << 32 | offset // 64 for name, offset in entries.tolist()})
        if segment % 7 == 6:
            count = sum(place >> 32 in (segment - 3, segment) for place in known.values())
            assert index.drop(segment - 3) + index.drop(segment) == count
            known = {name: place for name, place in known.items() if place >> 32 not in (segment - 3, segment)}
        name, place = next(iter(known.items()))
        index.forget(name, place + 1)  # it is elsewhere: nothing to forget
        if segment % 5 == 0:
            index.forget(name, place)
            del known[name]
        expected = [known.get(name, Index.NOWHERE) for name in range(6002)]
        assert index.find(np.arange(6002, dtype=np.uint64)).tolist() == expected
    assert index._names.nbytes + index._places.nbytes <= 16 * 6000


class SmallDisk:
    """A file system of so many bytes below one directory, by what the files there have; and one with a quota."""

    def __init__(self, path, size, monkeypatch, tells=True):
        self.path, self.size, self.tells, write = path, size, tells, os.pwritev
        self.others = 0  # bytes of files that are not the store's
        real = os.fstatvfs

        def pwritev(fd, buffers, offset):
            if self.left() < sum(len(memoryview(one).cast("B")) for one in buffers):
                raise OSError(errno.ENOSPC if self.tells else errno.EDQUOT, "planted")
            return write(fd, buffers, offset)

        def fstatvfs(fd):
            left = self.left() if self.tells else 1 << 40
            return SimpleNamespace(f_blocks=self.size, f_bavail=max(left, 0), f_frsize=1, f_bsize=real(fd).f_bsize)

        monkeypatch.setattr(os, "pwritev", pwritev)
        monkeypatch.setattr(os, "fstatvfs", fstatvfs)

    def left(self):
        return self.size - self.others - held(self.path)


@pytest.mark.parametrize("tells", [True, False], ids=["full", "quota of the user"])
def test_store_on_a_full_disk_drops_its_oldest_blocks_and_goes_on(tmp_path, monkeypatch, caplog, tells):
    disk_of = SmallDisk(tmp_path / "store", 10 * SEGMENT, monkeypatch, tells)
    store = opened(tmp_path / "store", reserve_nbytes=SEGMENT)
    for seed in range(20):
        kit.stores(store, blocks_of(seed, 8))
        kit.loads(store, blocks_of(seed, 8), range(8))
        assert disk_of.left() >= (SEGMENT if tells else 0), "the reserve is the others'"
        if seed == 10 and tells:
            disk_of.others = 4 * SEGMENT  # also where they take what the store would have
    stats = store.stats()["disk"]
    assert stats.dropped == 0 and stats.evicted > 0 and not store.is_paused and not caplog.records
    assert stats.reserve_nbytes == SEGMENT
    kit.loads(store, blocks_of(0, 8), [])


def test_store_on_a_file_system_that_does_not_say_its_size_has_its_quota(tmp_path, monkeypatch):
    silent = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096, f_bsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: silent)
    for how in ({}, {"reserve_nbytes": SEGMENT}):
        store = opened(tmp_path / f"store {len(how)}", **how)
        for seed in range(3):
            kit.stores(store, blocks_of(seed, 4))
            kit.loads(store, blocks_of(seed, 4), range(4))
        stats = store.stats()["disk"]
        assert not store.is_paused and stats.errors == stats.dropped == 0 and stats.limit_nbytes == store.max_nbytes


def test_limit_of_a_store_is_what_the_disk_has_beside_the_reserve(tmp_path, monkeypatch):
    disk_of = SmallDisk(tmp_path / "store", 100 * SEGMENT, monkeypatch)
    store = opened(tmp_path / "store", 50 * SEGMENT)
    assert store.stats()["disk"].reserve_nbytes == 5 * SEGMENT, "a twentieth"
    kit.stores(store, blocks_of(1, 8))
    for others, due in ((0, 50), (90, 5), (96, 0), (40, 50)):
        disk_of.others, end = others * SEGMENT, time.monotonic() + 60
        while abs(store.stats()["disk"].limit_nbytes - due * SEGMENT) >= SEGMENT and time.monotonic() < end:
            time.sleep(0.01)
        assert abs(store.stats()["disk"].limit_nbytes - due * SEGMENT) < SEGMENT, (others, due)


def test_store_that_finds_no_room_on_the_disk_takes_nothing_and_keeps_what_it_has(tmp_path, monkeypatch, caplog):
    disk_of = SmallDisk(tmp_path / "store", 10 * SEGMENT, monkeypatch)
    store = opened(tmp_path / "store", reserve_nbytes=SEGMENT)
    kit.stores(store, blocks_of(1, 4))
    disk_of.others = 9 * SEGMENT
    for seed in range(2, 8):
        assert store.store(blocks_of(seed), kit.content(LAYOUT, blocks_of(seed))) in (0, 20)
        assert store.drain(60)
    assert store.is_paused and len(caplog.records) == 1
    kit.loads(store, blocks_of(1, 4), range(4))


def test_segments_that_cannot_be_deleted_count_and_are_not_counted_as_gone(tmp_path, monkeypatch, caplog):
    store, unlink = opened(tmp_path / "store", 4 * SEGMENT), os.unlink
    kit.stores(store, blocks_of(0, 8))
    pinned = {path.name for path in (tmp_path / "store").glob("*.kvpool")}

    def refusing(path, **options):
        if path in pinned or len(pinned) > 99:
            raise OSError(errno.EPERM, "planted")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refusing)
    for seed in range(1, 6):
        kit.stores(store, blocks_of(seed, 4))
        assert held(tmp_path / "store") <= 4 * SEGMENT
    kit.loads(store, blocks_of(0, 4), range(4))
    assert not store.is_paused and store.stats()["disk"].evicted > 0, "others make room"
    pinned |= set(map(str, range(100)))  # none can be deleted from now on
    before = store.stats()["disk"]
    for seed in range(6, 12):
        store.store(blocks_of(seed, 4), kit.content(LAYOUT, blocks_of(seed, 4)))
        assert store.drain(60) and held(tmp_path / "store") <= 4 * SEGMENT
    after = store.stats()["disk"]
    assert store.is_paused and (after.evicted, after.errors) == (before.evicted, before.errors + 1)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "segments cannot be deleted; check who owns them" in told


@pytest.mark.parametrize("how", ["emptied", "deleted", "moved", "of another model"])
def test_directory_that_is_gone_comes_back(tmp_path, monkeypatch, how, caplog):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    store = opened("link/")
    monkeypatch.chdir(tmp_path / "elsewhere")
    kit.stores(store, blocks_of(1))
    if how == "emptied":
        for file in (tmp_path / "store").glob("*.kvpool*"):
            file.unlink()
    elif how == "deleted":
        shutil.rmtree(tmp_path / "store")
    else:
        (tmp_path / "store").rename(tmp_path / "moved")
    if how == "of another model":
        DiskStore(str(tmp_path / "store"), Layout(LAYOUT.groups, "other"), 1 << 24, segment_nbytes=SEGMENT).close()
        end = time.monotonic() + 60
        while not store.is_paused and time.monotonic() < end:
            store.store(blocks_of(2), kit.content(LAYOUT, blocks_of(2)))
            assert store.drain(60)
        assert store.is_paused and "another model" in caplog.records[-1].getMessage()
        assert not list((tmp_path / "store").glob("*.kvpool*"))
    else:
        end = time.monotonic() + 60
        while store.lookup(blocks_of(1)).any() and time.monotonic() < end:
            time.sleep(0.01)
        store.touch(blocks_of(1))
        kit.stores(store, blocks_of(2))
        kit.loads(store, blocks_of(2), range(20))
        kit.loads(store, blocks_of(1), [])
        assert not store.is_paused and (tmp_path / "store").stat().st_mode & 0o777 == 0o700
        again = opened(tmp_path / "store")
        kit.loads(again, blocks_of(2), range(20))


def test_sealed_file_is_opened_once(tmp_path, monkeypatch):
    writer, read, whole = opened(tmp_path / "store"), [], Folder.open
    kit.stores(writer, blocks_of(1))
    writer.close()
    monkeypatch.setattr(Folder, "open", lambda folder, name, *flags: read.append(name) or whole(folder, name, *flags))
    store = opened(tmp_path / "store")
    time.sleep(0.2)  # ten looks at the directory
    store.close()
    sealed = [name for name in read if name.endswith(".kvpool")]
    assert len(sealed) == len(set(sealed)) >= 4
