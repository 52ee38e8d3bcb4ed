"""A `DiskStore` whose files were damaged, swapped, replaced: 0 wrong hits, and what is whole is found."""

import errno
import json
import os
import shutil
import socket
import stat
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from kvpool.store import BlockLayout, DiskStore, Layout, disk, segment_format
from kvpool.store.disk import Folder
from kvpool.testing import stores as kit

SMALL = Layout((BlockLayout(2, 50, "full"),), "w")
HEADER, RECORD, FOOTER = 64, 128 + 64 + 64, 64 + 64  # of a segment of SMALL with four records or fewer
TOKENS = kit.prompt(1, 6)


def opened(path, layout=SMALL, **options):
    """A store on a directory, as it was when it knew everything there."""
    store = DiskStore(str(path), layout, 1 << 24, **{"segment_nbytes": 1 << 16, "refresh_seconds": 0.02, **options})
    assert store.ready.wait(60)
    return store


def filled(path, tokens=TOKENS, layout=SMALL):
    """A directory with one sealed segment, and the path of that segment."""
    store = opened(path, layout)
    kit.stores(store, layout.blocks(tokens)[0])
    store.close()
    (segment,) = path.glob("*.kvpool")
    return segment


def found(path, tokens=TOKENS, layout=SMALL):
    """Open a directory and load a prompt: which blocks are there."""
    store = opened(path, layout)
    there = np.flatnonzero(kit.loads(store, layout.blocks(tokens)[0])).tolist()
    store.close()
    return there


def test_segment_has_the_documented_bytes(tmp_path):
    segment = filled(tmp_path / "store")
    data = segment.read_bytes()
    assert len(data) == HEADER + 3 * RECORD + FOOTER
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert stat.S_IMODE(segment.parent.stat().st_mode) == 0o700
    blocks = SMALL.blocks(TOKENS)[0]
    rows = kit.content(SMALL, blocks)
    for number in range(3):
        record = data[HEADER + number * RECORD :][:RECORD]
        assert record[:16] == b"kvrecord" + (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        expected = [SMALL.digest, blocks.namespace, blocks.keys[number].tobytes(), blocks.parents[number].tobytes()]
        assert record[16:80] == b"".join(expected)
        assert record[80:88] == (2).to_bytes(4, "little") + bytes(4)
        assert record[88:96] == (50).to_bytes(8, "little") and record[104:120] == bytes(16)
        assert record[128:192] == blocks.tokens[number].astype("<i4").tobytes() + bytes(56)
        assert record[192:] == rows[number].tobytes() + bytes(14)


@pytest.mark.long
def test_every_byte_flipped_gives_no_wrong_hit_and_loses_one_block_at_most(tmp_path):
    source = filled(tmp_path / "store")
    whole = source.read_bytes()
    header_ends, records_end = HEADER, HEADER + 3 * RECORD
    for at in range(len(whole)):
        source.chmod(0o600)
        source.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        there = found(tmp_path / "store")
        if at >= header_ends:
            hit = (at - HEADER) // RECORD if at < records_end else -1
            assert set(there) >= {0, 1, 2} - {hit}, f"byte {at}: {there}"


def test_every_byte_of_the_layout_file_flipped_is_refused_or_harmless(tmp_path):
    filled(tmp_path / "store")
    file = tmp_path / "store" / "layout.json"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            there = found(tmp_path / "store")
        except ValueError as refused:
            assert str(refused).startswith("[DiskStore] ")
        else:
            assert there == [0, 1, 2]


@pytest.mark.parametrize("suffix", ["kvpool", "kvpool-open"])
def test_segment_cut_anywhere_keeps_its_whole_records(tmp_path, suffix):
    whole = filled(tmp_path / "store").read_bytes()
    for length in range(0, len(whole), 7):
        whole_records = max(min((length - HEADER) // RECORD, 3), 0)
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").mkdir(mode=0o700)
        file = tmp_path / "store" / f"{'a' * 16}.{suffix}"
        file.touch(0o600)
        file.write_bytes(whole[:length])
        assert found(tmp_path / "store") == list(range(whole_records)), length
        assert file.exists() == (suffix == "kvpool")  # one that grew is sealed, or has nothing and leaves
        if (sealed := file.with_suffix(".kvpool")).exists() and suffix == "kvpool-open":
            assert sealed.stat().st_size == HEADER + whole_records * RECORD + FOOTER


def test_duplicated_and_reordered_segments_are_read(tmp_path):
    segment = filled(tmp_path / "store")
    data = segment.read_bytes()
    records = [data[HEADER + number * RECORD :][:RECORD] for number in range(3)]
    for stem, content in (
        ("b" * 16, data),
        ("c" * 16, data[:HEADER] + records[2] + records[0] + records[1]),
        ("d" * 16, data[:HEADER] + records[1] * 3),
        ("e" * 16, data[:HEADER] + records[2] + records[1] + records[0] + data[-FOOTER:]),  # its footer lies
        ("f" * 16, data + data),
    ):
        file = segment.with_name(f"{stem}.kvpool")
        file.touch(0o600)
        file.write_bytes(content)
        there = found(tmp_path / "store")
        assert stem == "e" * 16 or there == [0, 1, 2]
    segment.unlink()
    found(tmp_path / "store")


def of_another_model(segment):
    other = filled(segment.parent.parent / "other", layout=Layout(SMALL.groups, "other weights"))
    shutil.copy(other, segment)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (of_another_model, "the layout is"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"sg\x01", b"sg\x02")), "the version is 2, this"),
        (lambda file: file.chmod(0o644), "type: chmod 600"),
    ],
)
def test_segment_that_is_refused_is_told_once_and_the_store_goes_on(tmp_path, caplog, damage, words):
    segment, blocks = filled(tmp_path / "store"), SMALL.blocks(TOKENS)[0]
    damage(segment)
    store = opened(tmp_path / "store")
    assert list(store.refused) == [segment.name] and words in store.refused[segment.name]
    kit.loads(store, blocks, [])
    kit.stores(store, blocks)
    kit.loads(store, blocks, range(3))
    time.sleep(0.2)  # ten looks at the directory
    store.close()
    (record,) = [each for each in caplog.records if "left out" in each.getMessage()]
    assert record.levelname == "WARNING" and words in record.getMessage()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_segment_that_could_not_be_opened_once_is_found_later(tmp_path, monkeypatch, number):
    filled(tmp_path / "store")
    failures, whole = iter([OSError(number, "planted")]), Folder.open

    def failing(folder, name, *flags):
        if name.endswith(".kvpool") and (failure := next(failures, None)):
            raise failure
        return whole(folder, name, *flags)

    monkeypatch.setattr(Folder, "open", failing)
    store, blocks = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0]
    kit.seen(store, blocks)
    assert not store.refused and store.stats()["disk"].errors == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_load_that_could_not_open_a_segment_forgets_no_block(tmp_path, monkeypatch, number):
    def failing(folder, name, *flags):
        raise OSError(number, "planted")

    filled(tmp_path / "store")
    store, blocks = opened(tmp_path / "store", refresh_seconds=60), SMALL.blocks(TOKENS)[0]
    with monkeypatch.context() as here:
        here.setattr(Folder, "open", failing)
        kit.loads(store, blocks, [])
    stats = store.stats()["disk"]
    assert (stats.errors, stats.evicted, stats.misses) == (1, 0, len(blocks))
    kit.loads(store, blocks, range(3))


@pytest.mark.skipif(segment_format.KIND == segment_format.CRC32, reason="needs xxhash")
def test_process_without_xxhash_leaves_segments_alone_that_it_cannot_check(tmp_path, monkeypatch):
    good = filled(tmp_path / "store")
    torn, damaged = good.with_name("e" * 16 + ".kvpool-open"), good.with_name("d" * 16 + ".kvpool")
    for file, data in ((torn, good.read_bytes()[: HEADER + 2 * RECORD + 40]), (damaged, b"no segment")):
        file.touch(0o600)
        file.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(segment_format, "_xxhash", None)
        patch.setattr(segment_format, "KIND", segment_format.CRC32)
        size = 1 << 12
        store = DiskStore(str(tmp_path / "store"), SMALL, 4 * size, segment_nbytes=size, refresh_seconds=0.02)
        sealed = torn.with_suffix(".kvpool")  # as it is: its writer is dead
        assert store.ready.wait(60) and set(store.refused) == {good.name, damaged.name, sealed.name}
        assert store.refused[good.name].startswith("checksums are of kind 1")
        kit.stores(store, SMALL.blocks(kit.prompt(0, 24))[0])
        for seed in range(2, 40):
            for old in set((tmp_path / "store").glob("*.kvpool")) - {good, damaged, sealed}:
                os.utime(old, (1, 1))
            kit.stores(store, SMALL.blocks(kit.prompt(seed, 24))[0])
        assert store.stats()["disk"].evicted > 100 and good.exists() and not damaged.exists()
        store.close()
    assert found(tmp_path / "store") == [0, 1, 2]
    assert found(tmp_path / "store", kit.prompt(39, 24)) == list(range(12))
    good.unlink()
    assert found(tmp_path / "store") == [0, 1]


def fifo(path):
    os.mkfifo(path, 0o600)


def bound(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


IN_THE_WAY = {
    "a directory": lambda path: path.mkdir(mode=0o700),
    "a fifo": fifo,
    "a socket": bound,
    "a link to a segment": lambda path: path.symlink_to(path.parent.parent / "kept"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "an empty file": lambda path: path.touch(0o600),
    "a file that others may read": lambda path: shutil.copy(path.parent.parent / "kept", path) and path.chmod(0o644),
}


@pytest.mark.parametrize("name", ["a" * 16 + ".kvpool", "a" * 16 + ".kvpool-open"])
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_something_in_the_place_of_a_segment_is_left_alone(tmp_path, what, name):
    segment = filled(tmp_path / "store")
    segment.rename(tmp_path / "kept")
    (tmp_path / "kept").chmod(0o600)
    IN_THE_WAY[what](tmp_path / "store" / name)
    store = opened(tmp_path / "store")
    blocks = SMALL.blocks(TOKENS)[0]
    kit.loads(store, blocks, [])
    kit.stores(store, blocks)
    kit.loads(store, blocks, range(3))
    assert (tmp_path / "kept").read_bytes()[:8] == b"kvpoolsg"


@pytest.mark.parametrize("name", ["layout.json", "lock"])
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_something_in_the_place_of_another_file_never_hangs(tmp_path, what, name):
    segment = filled(tmp_path / "store")
    shutil.copy(segment, tmp_path / "kept")
    (tmp_path / "store" / name).unlink()
    IN_THE_WAY[what](tmp_path / "store" / name)
    try:
        there = found(tmp_path / "store")
    except (OSError, ValueError):
        return
    assert there == [0, 1, 2]


def test_lock_whose_file_was_deleted_is_held_by_one_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_LOCK_SECONDS", 0.0)
    with closing(Folder(str(tmp_path / "store"), "one")) as one:
        (tmp_path / "store" / "lock").unlink()
        with closing(Folder(str(tmp_path / "store"), "other")) as other, other.lock(), pytest.raises(TimeoutError):
            one.lock().__enter__()


def test_link_that_was_swapped_in_while_the_store_is_open_is_a_miss(tmp_path):
    segment = filled(tmp_path / "store")
    store = opened(tmp_path / "store", refresh_seconds=3600.0)
    segment.rename(tmp_path / "moved")
    segment.symlink_to(tmp_path / "moved")
    kit.loads(store, SMALL.blocks(TOKENS)[0], [])


def test_read_error_is_a_miss_and_is_counted(tmp_path, monkeypatch):
    filled(tmp_path / "store")
    store, blocks = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0]

    def failing(read, fd, what, offset):
        if HEADER + RECORD <= offset < HEADER + 2 * RECORD:
            raise OSError(errno.EIO, "planted")
        return read(fd, what, offset)

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
    kit.loads(store, blocks, [0, 2])
    assert store.stats()["disk"].errors == 1
    monkeypatch.undo()
    kit.stores(store, blocks)
    kit.loads(store, blocks, range(3))  # it was forgotten, and so written again


@pytest.mark.parametrize("error", [None, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_write_error_drops_and_what_was_written_stays(tmp_path, monkeypatch, error):
    store, blocks, write = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0], os.pwritev

    def failing(fd, buffers, offset):
        """Write what fits: two records and a part of the third."""
        room = HEADER + 2 * RECORD + 100 - offset
        if room <= 100 and error is not None:
            raise OSError(error, "planted")
        return write(fd, [b"".join(buffers)[:room]], offset)

    monkeypatch.setattr(os, "pwritev", failing)
    kit_rows = kit.content(SMALL, blocks)
    store.store(blocks, kit_rows)
    assert store.drain(60)
    kit.loads(store, blocks, [0, 1])
    stats = store.stats()["disk"]
    assert (stats.errors, stats.dropped) == (1, 1)
    assert store.store(blocks, kit_rows) == 2  # it pauses
    store.close()
    monkeypatch.undo()
    assert found(tmp_path / "store") == [0, 1]


@pytest.mark.parametrize("count", [-1, 0, 50])
def test_segment_whose_header_could_not_be_written_leaves(tmp_path, monkeypatch, count):
    store, blocks, write = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0], os.pwrite

    def failing(fd, data, offset):
        if count < 0:
            raise OSError(errno.ENOSPC, "planted")
        return write(fd, data[:count], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        store.store(blocks, kit.content(SMALL, blocks))
        assert store.drain(60) and store.is_paused and store.stats()["disk"].dropped == 3
    store.close()
    assert not list((tmp_path / "store").glob("*.kvpool*")) and found(tmp_path / "store") == []


def test_store_that_pauses_says_why_once_until_it_writes_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk, "_PAUSE_SECONDS", 0.0)
    store, blocks, write = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0], os.pwritev
    rows = kit.content(SMALL, blocks)

    def failing(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "planted")

    for number, works in enumerate([False, True, False]):
        monkeypatch.setattr(os, "pwritev", write if works else failing)
        for _ in range(3):
            store.store(blocks[[number]], rows[[number]])
            assert store.drain(60)
    store.close()
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2 and all("takes nothing for" in text and "planted" in text for text in told)


def test_segment_that_could_not_be_sealed_is_sealed_later(tmp_path, monkeypatch):
    store, seal, failures = opened(tmp_path / "store", segment_nbytes=HEADER + RECORD + FOOTER), Folder.seal, []

    def fails_once(folder, stem):
        if not failures:
            failures.append(stem)
            raise OSError(errno.EIO, "planted")
        return seal(folder, stem)

    monkeypatch.setattr(Folder, "seal", fails_once)
    blocks = SMALL.blocks(TOKENS)[0]
    store.store(blocks, kit.content(SMALL, blocks))  # each begins a segment
    assert store.drain(60)
    end = time.monotonic() + 60  # a hang
    while not (tmp_path / "store" / f"{failures[0]}.kvpool").exists() and time.monotonic() < end:
        assert kit.loads(store, blocks).all()
        time.sleep(0.01)
    kit.loads(store, blocks, range(len(blocks)))
    store.close()
    assert not list((tmp_path / "store").glob("*.kvpool-open"))
    assert found(tmp_path / "store") == list(range(len(blocks)))


def test_read_only_directory_is_read(tmp_path, monkeypatch):
    filled(tmp_path / "store")
    system_open = os.open

    def read_only(path, flags, *rest, **named):
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "planted")
        return system_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    store, blocks = opened(tmp_path / "store"), SMALL.blocks(TOKENS)[0]
    kit.loads(store, blocks, range(3))
    others = SMALL.blocks(kit.prompt(2, 6))[0]
    assert store.store(others, kit.content(SMALL, others)) == 0


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda path: path.chmod(0o755), PermissionError, "others may use"),
        (lambda path: os.chown(path, 12345, 12345), PermissionError, "belongs to user 12345"),
        (lambda path: (path.rename(f"{path}2"), path.symlink_to(f"{path}2")), NotADirectoryError, "a link"),
        (lambda path: (path.rename(f"{path}2"), path.touch(0o600)), NotADirectoryError, "not a directory"),
        (lambda path: (path / "layout.json").chmod(0o640), PermissionError, "others may use"),
        (lambda path: (path / "lock").chmod(0o644), PermissionError, "type: chmod 600 .*/lock"),
        (lambda path: ((path / "lock").unlink(), (path / "lock").mkdir()), OSError, "lock cannot be opened: Is a dir"),
        (lambda path: (path / "layout.json").write_text("{}"), ValueError, "format version None"),
        (lambda path: (path / "layout.json").write_text("[]"), ValueError, "damaged"),
        (lambda path: (path / "layout.json").write_text(json.dumps({"version": 2})), ValueError, "format version 2"),
        (lambda path: (path / "layout.json").write_text(json.dumps({"version": 1})), ValueError, "another model"),
    ],
)
def test_directory_that_is_not_ours_is_refused_at_the_start(tmp_path, damage, error, words):
    filled(tmp_path / "store")
    if "chown" in damage.__code__.co_names and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    damage(tmp_path / "store")
    with pytest.raises(error, match=words) as raised:
        DiskStore(str(tmp_path / "store"), SMALL, 1 << 24)
    assert str(raised.value).removeprefix("[Errno 21] ").startswith("[DiskStore] ")


def test_new_directory_without_room_for_its_lock_is_refused_at_the_start(tmp_path, monkeypatch):
    def full(folder, name, *flags):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as here:
        here.setattr(Folder, "open", full)
        with pytest.raises(OSError, match="lock cannot be opened: No space left"):
            DiskStore(str(tmp_path / "store"), SMALL, 1 << 24)
    assert found(tmp_path / "store") == []


def test_layout_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *args, **named: (calls.append("replace"), replace(*args, **named)))
    layout = Layout([BlockLayout(2, 50, "word " * 400)] * 600, "w")
    for _ in range(2):  # and it is read again, however long it is
        opened(tmp_path / "store", layout).close()
    assert calls[:2] == ["fsync", "replace"]


@pytest.mark.parametrize("seed", range(20))
def test_segments_leave_by_order_of_use_whatever_the_clock_says(tmp_path, monkeypatch, seed):
    rng, day = np.random.default_rng(seed), 86400 * 10**9
    base, order = time.time_ns(), []
    with closing(Folder(str(tmp_path / "store"), "test")) as folder:
        for _ in range(60):
            clock = base + int(rng.integers(-400 * day, 400 * day))
            monkeypatch.setattr(time, "time_ns", lambda clock=clock: clock)
            if len(order) < 3 or rng.random() < 0.4:
                with folder.lock():
                    stem, fd = folder.create(b"x" * 64)
                os.close(fd)
                os.utime(tmp_path / "store" / (stem + ".kvpool-open"), ns=(clock, clock))
                folder.seal(stem)
            else:
                stem = order.pop(int(rng.integers(len(order))))
                folder.touch({stem: 1.0})
            order.append(stem)
        with folder.lock():
            gone = folder.make_room(0, 64 * (len(order) // 2), set())
        assert [each.stem for each in gone] == order[: len(gone)] and len(gone) == len(order) - len(order) // 2
