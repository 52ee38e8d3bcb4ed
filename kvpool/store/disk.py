"""`DiskStore`: blocks in segment files of a directory. docs/store.md has the format and the promises.

`Folder` is the directory: who may use it, which files are segments, how much may be written. Processes that share it
make room, create a segment and take over one whose writer has died under a lock on ``lock``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from threading import Event, RLock
from typing import NamedTuple

import numpy as np

from kvpool.spec import checked_int
from kvpool.store import segment_format as form
from kvpool.store.blocks import Blocks, Layout, Rows, TierStats, checked, checked_layout
from kvpool.store.outbox import Outbox, Waiting

_log = logging.getLogger(__name__)
_SEGMENT_NBYTES = 128 << 20
_BATCH_NBYTES = 8 << 20  # of payloads that are written together; each call delays the threads that compute
_CALL_RECORDS = 1024 // 3  # IOV_MAX; a record has three parts
_RESERVE_NBYTES = 1 << 30
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NUMBER = re.compile(r"-?\d+")
_PAUSE_SECONDS = 60.0  # without writing, after the disk refused
_TOUCH_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}  # errors that say nothing about a file: tried again
SEALED, GROWING = ".kvpool", ".kvpool-open"
NEW = ".new"  # of a small file, until it has its name
_SEGMENT = re.compile(r"([0-9a-f]{16})(\.kvpool|\.kvpool-open)")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_SECONDS = 10.0


class Refused(OSError):
    """The quota does not allow it. Nothing has failed."""


class Listed(NamedTuple):
    """A segment file."""

    stem: str
    name: str
    is_sealed: bool
    nbytes: int
    used: int  # when it was last of use, in ns, see `Folder.touch`


class Folder:
    """An open directory; made, readable by its owner alone, if it is not there. Without `create` nothing is made.

    NotADirectoryError, PermissionError: it is not a directory, a link, another user's, or others may read it. OSError:
    the file ``lock`` cannot be made, for another reason than that nothing may be written here.
    """

    def __init__(self, path: str, call: str, create: bool = True) -> None:
        self.path, self._call = os.fspath(path), call
        self._place = os.path.realpath(self.path)  # the process may change its directory
        if create:
            with suppress(FileExistsError):
                os.makedirs(self.path, mode=0o700)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(f"[{call}] there is no directory {self.path}") from None
        except OSError as error:
            raise NotADirectoryError(f"[{call}] {self.path} is not a directory, or a link ({error.strerror})") from None
        self.is_read_only = False
        try:
            self._check_owner(os.fstat(self.fd), self.path, "chmod 700")
            try:
                os.close(self.open("lock", _LOCK | os.O_CREAT * create))
            except OSError as error:
                self.is_read_only = True
                if create and error.errno is None:  # it was opened, and is not a file of ours
                    raise
                if create and error.errno not in (errno.EROFS, errno.EACCES):
                    text = f"[{call}] {self.path}/lock cannot be opened: {error.strerror}"
                    raise OSError(error.errno, text) from None
        except BaseException:
            self.close()
            raise

    @property
    def is_gone(self) -> bool:
        """Whether the directory was deleted or moved: another one, or none, is at its path."""
        try:
            return not os.path.samestat(os.stat(self._place, follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False  # what cannot be seen is not known to be gone

    def make_anew(self, layout: Layout) -> None:
        """Take the directory that is at the path now; made if it is not there. It raises what a new `Folder` raises.

        Other threads may be about to open files in the old one, so the new one gets its descriptor.
        """
        with closing(Folder(self._place, self._call)) as new:
            if new.is_read_only or self.is_read_only:
                raise PermissionError(f"[{self._call}] {self.path} is read-only")
            new.check_layout(layout)
            os.dup2(new.fd, self.fd, inheritable=False)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    # ---------------------------------------------------------------------- files

    def open(self, name: str, flags: int = _READ) -> int:
        """Open a file of ours; OSError if it is a link, no regular file, another user's, or others may read it."""
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"[{self._call}] {self.path}/{name} is not a regular file")
            self._check_owner(status, f"{self.path}/{name}", "chmod 600")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_owner(self, status: os.stat_result, path: str, remedy: str) -> None:
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"[{self._call}] {path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(f"[{self._call}] others may use {path} (mode {mode:o}); type: {remedy} {path}")

    def open_segment(self, stem: str) -> int:
        """Open a segment, sealed by now or not; FileNotFoundError if it has left."""
        for name in (stem + SEALED, stem + GROWING):
            with suppress(FileNotFoundError):
                return self.open(name)
        return self.open(stem + SEALED)  # it was sealed between the two

    def segments(self, known: Sequence[Listed] = ()) -> list[Listed]:
        """The segment files, in no order, links left out. Sealed ones among those `known` are not looked at again."""
        found, sealed = [], {each.name: each for each in known if each.is_sealed}
        with os.scandir(self.fd) as entries:
            for entry in entries:
                if (each := sealed.get(entry.name)) is not None:
                    found.append(each)
                    continue
                if (match := _SEGMENT.fullmatch(entry.name)) is None:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        stem, suffix = match.groups()
                        found.append(Listed(stem, entry.name, suffix == SEALED, status.st_size, status.st_mtime_ns))
        return found

    def create(self, header: bytes) -> tuple[str, int]:
        """Make a segment that this process holds; return its stem and file. Call it with the lock."""
        stem = secrets.token_hex(8)
        fd = os.open(stem + GROWING, _CREATE, 0o600, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pwrite(fd, header, 0) != len(header):
                raise OSError(errno.ENOSPC, f"[{self._call}] the disk is full")
        except BaseException:
            os.close(fd)
            self.remove(stem + GROWING)
            raise
        return stem, fd

    def adopt(self, name: str) -> int | None:
        """Open a growing segment for writing if its writer has died, else None. Call it with the lock."""
        try:
            fd = self.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    def seal(self, stem: str) -> None:
        """Say that a segment does not grow any more, and that it is of use now."""
        os.rename(stem + GROWING, stem + SEALED, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.touch({stem: 1.0})

    def remove(self, name: str) -> bool:
        """Delete a file, if it is there. Return whether it is gone."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return True

    def disk(self) -> tuple[int, int]:
        """Return the bytes of the file system, and those of them that this user may still write.

        Both are without end where the file system does not say, as some that are not on a disk.
        """
        found = os.fstatvfs(self.fd)
        if not found.f_blocks:
            return sys.maxsize, sys.maxsize
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def touch(self, shares: dict[str, float]) -> None:
        """Say which share of each sealed segment was of use: its time goes towards now by the root of the share.

        The whole way would keep a segment for one block, the share itself would forget what is hot and small. Where the
        clock is behind the latest time here, because one of the two was wrong, now is the moment after that time: the
        order of use does not depend on the clock.
        """
        with suppress(OSError):
            latest = max((each.used for each in self.segments() if each.is_sealed), default=0)
            for stem, share in shares.items():
                latest = now = max(time.time_ns(), latest + 1)
                with suppress(FileNotFoundError):
                    used = os.stat(stem + SEALED, dir_fd=self.fd, follow_symlinks=False).st_mtime_ns
                    used = now - int((now - used) * (1 - min(share, 1.0) ** 0.5))
                    os.utime(stem + SEALED, ns=(used, used), dir_fd=self.fd, follow_symlinks=False)

    def make_room(self, nbytes: int, max_nbytes: int, worthless: set[str], spare: int | None = None) -> list[Listed]:
        """Delete sealed segments until one of `nbytes` fits; return them. `Refused` if it cannot fit.

        A growing segment counts as full. The limit is `max_nbytes`, or what they have now and `spare` bytes, if that is
        less. First go those in `worthless`, then the ones whose last use is longest ago. Those that cannot be deleted
        stay and count. Call it with the lock.
        """
        listed = self.segments()
        limit = max_nbytes if spare is None else min(max_nbytes, spare + sum(each.nbytes for each in listed))
        held = sum(each.nbytes if each.is_sealed else max(nbytes, each.nbytes) for each in listed)
        victims = sorted(
            (each for each in listed if each.is_sealed), key=lambda each: (each.name not in worthless, each.used)
        )
        excess, gone, undeleted = held + nbytes - limit, [], 0
        if excess > sum(victim.nbytes for victim in victims):
            why = f"{held} bytes are in use, segments that grow counted as full, the limit is {max_nbytes}"
            why = why if limit == max_nbytes else f"the disk has {max(spare or 0, 0)} bytes beside its reserve"
            raise Refused(f"[{self._call}] {self.path} is full: {why}")
        for victim in victims:
            if excess <= 0:
                break
            if self.remove(victim.name):
                excess -= victim.nbytes
                gone.append(victim)
            else:
                undeleted += 1
        if excess > 0:
            why = f"{undeleted} segments cannot be deleted; check who owns them"
            raise OSError(f"[{self._call}] {self.path} is full: {why}")
        return gone

    # ---------------------------------------------------------------------- what processes share

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the directory; TimeoutError if another process does not let it go."""
        if self.is_read_only:
            raise PermissionError(f"[{self._call}] {self.path} is read-only")
        end = time.monotonic() + _LOCK_SECONDS
        while (fd := self._locked()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"[{self._call}] another process holds {self.path}/lock")
            time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file too
            os.close(fd)

    def _locked(self) -> int | None:
        """Lock the file; None: another process holds it, or it is not the one of that name, as somebody deletes it."""
        fd = self.open("lock", _LOCK | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat("lock", dir_fd=self.fd, follow_symlinks=False)):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def read_json(self, name: str) -> dict[str, object]:
        """The content of a small file; ValueError if it is damaged."""
        fd = self.open(name)
        try:
            found = json.loads(os.read(fd, os.fstat(fd).st_size))
        except RecursionError:
            raise ValueError("brackets without end") from None
        finally:
            os.close(fd)
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found

    def write_json(self, name: str, content: dict[str, object]) -> None:
        """Replace a small file as a whole; it is whole after a loss of power too. With the lock."""
        temporary = name + NEW
        self.remove(temporary)  # of a process that was killed
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self.fd)
        try:
            data = json.dumps(content, indent=1).encode()
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, f"[{self._call}] the disk is full")
            os.fsync(fd)
            os.replace(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            raise
        finally:
            os.close(fd)

    def check_layout(self, layout: Layout) -> None:
        """Write down what the records here hold; ValueError if they hold something else."""
        own: dict[str, object] = {"version": form.VERSION, "layout": layout.digest.hex(), "text": list(layout.lines)}
        try:
            there = self.read_json("layout.json")
        except FileNotFoundError:
            if self.is_read_only:
                return
            with self.lock():
                try:
                    os.stat("layout.json", dir_fd=self.fd, follow_symlinks=False)
                except FileNotFoundError:
                    return self.write_json("layout.json", own)
            return self.check_layout(layout)  # another process was faster
        except ValueError:
            raise ValueError(
                f"[{self._call}] {self.path}/layout.json is damaged; delete the directory, or restore the file"
            ) from None
        if there.get("version") != form.VERSION:
            raise ValueError(
                f"[{self._call}] {self.path} has format version {there.get('version')!r}, this kvpool knows "
                f"{form.VERSION}"
            )
        if there.get("layout") != own["layout"]:
            text = there.get("text")
            lines = zip_longest(text if isinstance(text, list) else [], layout.lines, fillvalue="?")
            first, own_line = next((pair for pair in lines if pair[0] != pair[1]), ("?", layout.lines[0]))
            raise ValueError(
                f"[{self._call}] {self.path} is a store of another model or layout ({first}), not of this one "
                f"({own_line}); take another directory"
            )


@dataclass(slots=True)
class _Segment:
    """A segment file that was read."""

    stem: str
    kind: int  # of its checksums
    is_sealed: bool
    end: int  # of the records that were seen
    blocks: int = 0  # that were seen
    used: int = 0  # of these, since the others were told


class _Record(NamedTuple):
    """A block as it is written: head, payload, padding."""

    name: int
    nbytes: int
    parts: tuple[bytes, memoryview, bytes]


def _record(item: Waiting) -> _Record:
    head = form.packed_record(item.fields, item.tokens, item.row)
    padding = bytes(form.aligned(item.row.nbytes) - item.row.nbytes)
    return _Record(item.name, len(head) + item.row.nbytes + len(padding), (head, item.row.data, padding))


@dataclass(slots=True)
class _Growing:
    """The segment that this process appends to."""

    number: int
    stem: str
    fd: int
    end: int
    names: list[int]
    offsets: list[int]

    def fits(self, nbytes: int, most: int, count: int = 1) -> bool:
        """Whether so many records of `nbytes` in all fit."""
        footer = form.aligned((len(self.names) + count) * form.FOOTER.itemsize) + form.TRAILER.size
        return self.end + nbytes + footer <= most

    def fitting(self, records: list[_Record], most: int) -> list[_Record]:
        """The records, of which the first has room, that one call writes."""
        some, nbytes = records[:1], records[0].nbytes
        for record in records[1:_CALL_RECORDS]:
            nbytes += record.nbytes
            if not self.fits(nbytes, most, len(some) + 1):
                break
            some.append(record)
        return some


class DiskStore:
    """Blocks on a disk, within a quota, for one process or several. See `BlockStore`.

    Parameters
    ----------
    path : str
        A directory of this user that nobody else may read; made if it is not there. All its stores have one layout.
    layout : Layout
    max_nbytes : int
        Most bytes of all segments in the directory, of all processes.
    reserve_nbytes : int, optional
        Free bytes of the disk that it leaves to others: no segment begins that would take them. By default 1 GiB, or a
        twentieth of the disk if that is less.
    queue_nbytes : int
        Most bytes of blocks that wait to be written. What does not fit is dropped.
    segment_nbytes : int, optional
        Size of a segment: 128 MiB, less for a small quota, more for large blocks. Room is made by whole segments.
    refresh_seconds : float
        How often the directory is looked at for what other processes wrote.

    Raises
    ------
    TypeError, ValueError
        A size is not a size, or the directory has another format or layout.
    PermissionError, NotADirectoryError
        The directory is not this user's own.
    """

    def __init__(
        self,
        path: str,
        layout: Layout,
        max_nbytes: int,
        *,
        reserve_nbytes: int | None = None,
        queue_nbytes: int = 256 << 20,
        segment_nbytes: int | None = None,
        refresh_seconds: float = 1.0,
    ) -> None:
        self.layout = checked_layout("DiskStore", layout)
        self.max_nbytes = checked_int("DiskStore", "max_nbytes", max_nbytes)
        queue_nbytes = checked_int("DiskStore", "queue_nbytes", queue_nbytes)
        record = form.HEADER.size + form.TRAILER.size + form.ALIGNMENT
        record += max(form.head_nbytes(g.block_size) + form.aligned(g.nbytes) for g in layout.groups)
        if segment_nbytes is None:
            segment_nbytes = max(min(_SEGMENT_NBYTES, self.max_nbytes // 4), record)
        self.segment_nbytes = checked_int("DiskStore", "segment_nbytes", segment_nbytes)
        if reserve_nbytes is not None:
            checked_int("DiskStore", "reserve_nbytes", reserve_nbytes, 0)
        form.check_sizes("DiskStore", layout, form.MOST_RECORD)
        for name, value, least, most in (
            ("segment_nbytes", self.segment_nbytes, record, form.MOST_SEGMENT),
            ("max_nbytes", self.max_nbytes, 2 * self.segment_nbytes, None),
            ("queue_nbytes", queue_nbytes, max(group.nbytes for group in layout.groups), None),
        ):
            if value < least:
                raise ValueError(f"[DiskStore] {name} is {value}, the least for this layout is {least}")
            if most is not None and value > most:
                raise ValueError(f"[DiskStore] {name} is {value}, the limit is {most}")
        self.ready = Event()  #: set when all that was there at the start is known; before that, lookups find less
        self.refused: dict[str, str] = {}  #: segment files that cannot be used, and why
        self._lock = RLock()  # guards what follows, up to `_is_closed`
        self._index = form.Index()
        self._segments: dict[int, _Segment] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._held_nbytes = 0
        self._is_closed = False
        self._listed: list[Listed] = []  # what was in the directory. The thread's alone, as what follows
        self._growing: _Growing | None = None
        self._worthless: set[str] = set()  # of those refused: damaged, or of another layout
        self._refusal = ""  # why it pauses; empty when a block was written
        self._touched = time.monotonic()
        self._folder = Folder(path, "DiskStore")
        try:
            self._folder.check_layout(layout)
            self._reserve = min(_RESERVE_NBYTES, self._folder.disk()[0] // 20)
            self._reserve = self._reserve if reserve_nbytes is None else reserve_nbytes
            self._counts = TierStats(limit_nbytes=self.max_nbytes, reserve_nbytes=self._reserve)  # with the lock
            self._paused_until = float("inf") if self._folder.is_read_only else 0.0
            self._outbox = Outbox(self._write, self._refresh, self._end, queue_nbytes, refresh_seconds, _BATCH_NBYTES)
        except BaseException:
            self._folder.close()
            raise

    def __repr__(self) -> str:
        return f"<DiskStore in {self._folder.path}, {len(self._index)} blocks, at most {self.max_nbytes} bytes>"

    @property
    def is_paused(self) -> bool:
        """Whether a pause runs, in which it takes nothing: the disk or the quota refused."""
        return time.monotonic() < self._paused_until

    # ---------------------------------------------------------------------- calls

    def lookup(self, blocks: Blocks) -> np.ndarray:
        """See `BlockStore.lookup`. Blocks that wait to be written are not found."""
        checked("lookup", self.layout, blocks)
        names = form.names_of(blocks.keys, blocks.group)
        with self._lock:
            return self._index.find(names) != form.Index.NOWHERE

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        checked("load", self.layout, blocks, rows, writable=True)
        names = form.names_of(blocks.keys, blocks.group)
        with self._lock:
            places = self._index.find(names)
        loaded = np.zeros(len(blocks), bool)
        found = np.flatnonzero(places != form.Index.NOWHERE)
        found = found[np.argsort(places[found])]
        numbers = places[found] >> np.uint64(32)
        for number in np.unique(numbers).tolist():
            which = found[numbers == number]
            into = [rows[index] for index in which.tolist()]
            loaded[which] = self._load_from(number, blocks[which], names[which], places[which], into)
        hits = int(loaded.sum())
        nbytes = hits * self.layout.groups[blocks.group].nbytes
        self._count(hits=hits, hit_nbytes=nbytes, misses=len(blocks) - len(found))
        return loaded

    def store(self, blocks: Blocks, rows: Rows) -> int:
        checked("store", self.layout, blocks, rows)
        names = form.names_of(blocks.keys, blocks.group)
        with self._lock:
            if self._is_closed:
                return 0
            new = np.flatnonzero(self._index.find(names) == form.Index.NOWHERE)
        took = waiting = 0
        if new.size and time.monotonic() >= self._paused_until:
            chosen = [rows[number] for number in new.tolist()]
            took, waiting = self._outbox.put(self.layout.digest, blocks[new], chosen, names[new])
        nbytes = took * self.layout.groups[blocks.group].nbytes
        self._count(stored=took, stored_nbytes=nbytes, dropped=len(new) - took - waiting)
        return len(blocks) - len(new) + took + waiting

    def touch(self, blocks: Blocks) -> None:
        """See `BlockStore.touch`: segments with these blocks leave later."""
        checked("touch", self.layout, blocks)
        with self._lock:
            places = self._index.find(form.names_of(blocks.keys, blocks.group))
            numbers = places[places != form.Index.NOWHERE] >> np.uint64(32)
            for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                self._segments[int(number)].used += int(count)

    def drain(self, timeout: float = 60.0) -> bool:
        return self._outbox.drain(timeout)

    def stats(self) -> dict[str, TierStats]:
        with self._lock:
            gauges = {"blocks": len(self._index), "nbytes": self._held_nbytes, "queued_nbytes": self._outbox.nbytes}
            return {"disk": self._counts._replace(**gauges, write_seconds=self._outbox.seconds)}

    def close(self) -> None:
        """Write what waits and seal the segment; see `BlockStore.close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._count(dropped=self._outbox.close(_CLOSE_SECONDS))
        with self._lock:  # the thread may still write one block
            self._index, self._segments, self._numbers = form.Index(), {}, {}

    # ---------------------------------------------------------------------- reading

    def _load_from(
        self, number: int, blocks: Blocks, names: np.ndarray, places: np.ndarray, rows: Sequence[np.ndarray]
    ) -> list[bool]:
        """Load blocks of one segment, in the order of their places. Return which were loaded."""
        loaded = [False] * len(blocks)
        with self._lock:
            segment = self._segments.get(number)
        if segment is None:
            self._count(misses=len(blocks))
            return loaded
        try:
            fd = self._folder.open_segment(segment.stem)
        except OSError as error:
            if error.errno not in _PASSING:
                with self._lock:
                    self._forget(number)
            self._count(misses=len(blocks), errors=error.errno != errno.ENOENT)
            return loaded
        own = self.layout.groups[blocks.group]
        head = bytearray(form.head_nbytes(own.block_size))
        damaged = errors = 0
        try:
            for at, (fields, tokens) in enumerate(form.expected_heads(self.layout.digest, blocks, own.nbytes)):
                offset = int(places[at] & np.uint64(0xFFFFFFFF)) * form.ALIGNMENT
                try:
                    count = os.preadv(fd, [head, rows[at].data], offset)
                except OSError:
                    count, errors = -1, errors + 1
                if count == len(head) + own.nbytes and form.is_right(segment.kind, head, fields, tokens, rows[at]):
                    loaded[at] = True
                    continue
                damaged += count >= 0
                is_named_right = count < 0 or (head.startswith(fields) and head.endswith(tokens))
                if is_named_right or not _is_whole(fd, offset, segment.kind):
                    with self._lock:  # a whole record of other content stays
                        self._index.forget(int(names[at]), int(places[at]))
        finally:
            os.close(fd)
        with self._lock:
            segment.used += sum(loaded)
        self._count(damaged=damaged, errors=errors)
        return loaded

    # ---------------------------------------------------------------------- the thread

    def _write(self, items: list[Waiting]) -> None:
        """Write blocks, as many in one call of the system as a segment takes: each call delays who computes here."""
        with self._lock:
            places = self._index.find(np.array([item.name for item in items], np.uint64))
        records = [_record(item) for item, place in zip(items, places, strict=True) if place == form.Index.NOWHERE]
        while records:
            try:
                growing, count = self._appended(records)
            except OSError as error:
                self._count(dropped=len(records), errors=not isinstance(error, Refused))
                self._seal()
                return self._pause(error)
            if growing is None:
                return self._count(dropped=len(records))
            self._refusal = ""
            begun = growing.end
            with self._lock:
                for record in records[:count]:
                    growing.names.append(record.name)
                    growing.offsets.append(growing.end)
                    if growing.number in self._segments:
                        self._index.add(record.name, growing.number, growing.end)
                    growing.end += record.nbytes
                self._held_nbytes += growing.end - begun
            self._count(written_nbytes=growing.end - begun)
            del records[:count]

    def _appended(self, records: list[_Record]) -> tuple[_Growing | None, int]:
        """Write the first records behind the last one. Return their segment, None in a pause, and how many these are.

        `OSError` if none was written. If the disk is full, the oldest own segments make room, once.
        """
        for is_first in (True, False):
            try:
                growing = self._growing_with_room(records[0].nbytes)
                if growing is None:
                    break
                some = growing.fitting(records, self.segment_nbytes)
                written = os.pwritev(growing.fd, [part for record in some for part in record.parts], growing.end)
                ends = accumulate(record.nbytes for record in some)
                if count := sum(end <= written for end in ends):
                    return growing, count
                raise OSError(errno.ENOSPC, "the disk is full")
            except OSError as error:
                if error.errno not in _FULL or not is_first:
                    raise
                self._seal()
                try:
                    with self._folder.lock():
                        self._make_room(is_full=True)
                except Refused:
                    raise error from None
                self._count(errors=1)
        return None, 0

    def _growing_with_room(self, nbytes: int) -> _Growing | None:
        """The segment to append to; None in a pause. `OSError` if the disk or the quota refuse."""
        if self._growing is not None and not self._growing.fits(nbytes, self.segment_nbytes):
            self._seal()
        if self._growing is None and time.monotonic() >= self._paused_until:
            self._come_back()
            with self._folder.lock():
                self._begin()
        return self._growing

    def _come_back(self) -> None:
        """Make the directory anew if somebody has deleted it."""
        if self._folder.is_gone and not self._folder.is_read_only:
            try:
                self._folder.make_anew(self.layout)
            except ValueError as error:  # there is one of another layout
                raise Refused(str(error)) from None

    def _pause(self, why: OSError) -> None:
        """Write nothing for a while. The log has the reason once, not with each pause that follows."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        text = str(why).removeprefix("[DiskStore] ")
        if (kind := _NUMBER.sub("", text)) != self._refusal:
            _log.warning("[DiskStore] %s takes nothing for %d s: %s", self._folder.path, _PAUSE_SECONDS, text)
        self._refusal = kind

    def _begin(self) -> None:
        self._make_room()
        stem, fd = self._folder.create(form.packed_header(self.layout.digest))
        with self._lock:
            number = self._know(_Segment(stem, form.KIND, False, form.HEADER.size))
            self._held_nbytes += form.HEADER.size
        self._count(written_nbytes=form.HEADER.size)
        self._growing = _Growing(number, stem, fd, form.HEADER.size, [], [])

    def _make_room(self, is_full: bool = False) -> None:
        """Delete segments until a new one fits quota and disk; `Refused` if it cannot. With the lock of the folder.

        With `is_full` a write has failed: the system has no byte for us, whatever it says of the disk.
        """
        self._touch_used()
        spare = self._folder.disk()[1] - self._reserve
        spare = min(spare, 0) if is_full else spare
        gone = self._folder.make_room(self.segment_nbytes, self.max_nbytes, self._worthless, spare)
        with self._lock:
            for each in gone:
                self._held_nbytes -= each.nbytes
                self._forget(self._numbers.get(each.stem, -1))

    def _end(self) -> None:
        self._seal()
        with self._lock:
            self._folder.close()

    def _seal(self) -> None:
        """Give the growing segment its footer and its last name. Without a footer it is read record by record."""
        growing, self._growing = self._growing, None
        if growing is None:
            return
        entries = np.zeros(len(growing.names), form.FOOTER)
        entries["name"], entries["offset"] = growing.names, growing.offsets
        try:
            self._close_segment(growing.stem, growing.fd, entries, growing.end, form.KIND)
        except OSError:
            return self._count(errors=1)  # a later look at the directory adopts it
        with self._lock:
            segment = self._segments.get(growing.number)
            if segment is not None:  # the store is not closed, and nobody has deleted the file
                segment.is_sealed, segment.blocks = True, len(entries)
                self._index.merge({growing.number: entries})

    def _close_segment(self, stem: str, fd: int, entries: np.ndarray, end: int, kind: int) -> None:
        """Cut off what is behind the last record, write the footer, seal."""
        try:
            if not len(entries):
                self._folder.remove(stem + GROWING)
                return
            os.ftruncate(fd, end)
            footer = form.packed_footer(self.layout.digest, entries, end, kind)
            try:
                written = os.pwrite(fd, footer, end)
            except OSError:
                written = -1
            if written != len(footer):
                os.ftruncate(fd, end)
                written = 0
            self._folder.seal(stem)
        finally:
            os.close(fd)
        with self._lock:
            self._held_nbytes += written
        self._count(written_nbytes=written)

    # ---------------------------------------------------------------------- the directory

    def _refresh(self) -> None:
        """Look at the directory: take what other processes wrote, forget what they deleted."""
        if self._is_closed:
            self.ready.set()
            return
        try:
            self._come_back()
            if not (self.ready.is_set() or self._folder.is_read_only):
                with suppress(OSError), self._folder.lock():
                    self._folder.make_room(0, self.max_nbytes, set())  # the quota may be smaller than it was
            self._listed = self._folder.segments(self._listed)
            spare = self._folder.disk()[1] - self._reserve
        except OSError:
            self.ready.set()
            return self._count(errors=1)
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touch_used()
        self._drop_absent()
        footers: dict[int, np.ndarray] = {}
        before, own = len(self.refused), "" if self._growing is None else self._growing.stem
        for each in self._listed:
            known = self._segments.get(self._numbers.get(each.stem, -1))
            if not (each.stem == own or each.name in self.refused or (known and known.is_sealed)):
                footers.update(self._news(each, known))
        if new := list(self.refused.items())[before:]:
            _log.warning("[DiskStore] %d segments in %s are left out: %s: %s", len(new), self._folder.path, *new[0])
        with self._lock:
            footers = {number: found for number, found in footers.items() if number in self._segments}
            if footers:
                self._index.merge(footers)
            self._held_nbytes = sum(each.nbytes for each in self._listed)
            limit = min(self.max_nbytes, max(self._held_nbytes + spare, 0))
            self._counts = self._counts._replace(limit_nbytes=limit)
        self.ready.set()

    def _drop_absent(self) -> None:
        """Forget the segments that are not in the directory any more."""
        present, names = {each.stem for each in self._listed}, {each.name for each in self._listed}
        if self._growing is not None and self._growing.stem not in present:  # somebody has deleted the file
            growing, self._growing = self._growing, None
            with suppress(OSError):  # what a disk could not write may be told only now
                os.close(growing.fd)
        self.refused = {name: why for name, why in self.refused.items() if name in names}
        self._worthless &= names
        with self._lock:
            for number in [number for stem, number in self._numbers.items() if stem not in present]:
                self._forget(number)

    def _news(self, each: Listed, known: _Segment | None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the entries of a segment that is sealed now; note those of one that another process appends to."""
        try:
            if not each.is_sealed and self._adopt(each):
                each = each._replace(name=each.stem + SEALED, is_sealed=True)
            fd = self._folder.open(each.name)
        except FileNotFoundError:
            return
        except OSError as error:
            return self._refuse(each.name, error)
        try:
            size = os.fstat(fd).st_size
            if size == 0 and not each.is_sealed:
                return  # its writer is about to write the header
            begin = form.HEADER.size if known is None or each.is_sealed else known.end
            kind, entries, end = self._read_segment(fd, size, begin, each.is_sealed)
        except (OSError, ValueError) as error:
            return self._refuse(each.name, error)
        finally:
            os.close(fd)
        with self._lock:
            number = self._know(_Segment(each.stem, kind, each.is_sealed, end, len(entries)))
            if not each.is_sealed and number in self._segments:
                for name, offset in entries.tolist():
                    self._index.add(name, number, offset)
        if each.is_sealed:
            yield number, entries

    def _read_segment(self, fd: int, size: int, begin: int, is_sealed: bool) -> tuple[int, np.ndarray, int]:
        """Kind of checksums, entries of our records and where these end: by the footer, or from `begin` on."""
        kind, layout = form.read_header(fd)
        if layout != self.layout.digest:
            raise ValueError(f"the layout is {layout.hex()}, not {self.layout.digest.hex()}")
        found = form.read_footer(fd, size, layout) if is_sealed else None
        return kind, *(found or form.scanned(fd, begin, size, kind, self._is_ours))

    def _refuse(self, name: str, error: OSError | ValueError) -> None:
        """Leave a segment out, unless the error may pass: then the next look tries again."""
        if isinstance(error, OSError) and error.errno in _PASSING:
            return self._count(errors=1)
        self.refused[name] = str(error)
        if isinstance(error, ValueError) and not isinstance(error, form.UnknownFormat):
            self._worthless.add(name)

    def _adopt(self, each: Listed) -> bool:
        """Seal a segment whose writer has died; whether it is sealed now. One without a whole header has nothing."""
        try:
            with self._folder.lock():
                fd = self._folder.adopt(each.name)
                if fd is None:
                    return False
                if (size := os.fstat(fd).st_size) < form.HEADER.size:
                    os.close(fd)
                    self._folder.remove(each.name)
                    return False
                try:
                    kind, entries, end = self._read_segment(fd, size, form.HEADER.size, False)
                except (OSError, ValueError):
                    os.close(fd)
                    self._folder.seal(each.stem)  # as it is: looked at then like any other
                    return True
                self._close_segment(each.stem, fd, entries, end, kind)
                return True
        except OSError:
            return False

    def _is_ours(self, head: form.Head) -> bool:
        if head.layout != self.layout.digest or head.group >= len(self.layout.groups):
            return False
        own = self.layout.groups[head.group]
        return (head.num_tokens, head.nbytes) == (own.block_size, own.nbytes)

    def _know(self, segment: _Segment) -> int:
        """Give a segment its number; a closed store knows of none. With the lock."""
        if self._is_closed:
            return -1
        number = self._numbers.get(segment.stem)
        if number is None:
            number = self._numbers[segment.stem] = self._next_number
            self._next_number += 1
        self._segments[number] = segment
        return number

    def _forget(self, number: int) -> None:
        """Forget a segment that has left, and its blocks. With the lock."""
        segment = self._segments.pop(number, None)
        if segment is not None:
            del self._numbers[segment.stem]
            self._counts = self._counts.plus(evicted=self._index.drop(number))

    def _touch_used(self) -> None:
        """Write down which segments were of use, for whoever makes room: this process, another, a later one."""
        self._touched = time.monotonic()
        with self._lock:
            used = [(each, each.used) for each in self._segments.values() if each.used and each.is_sealed]
        if used:
            self._folder.touch({segment.stem: count / max(segment.blocks, 1) for segment, count in used})
            with self._lock:
                for segment, count in used:
                    segment.used -= count

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts = self._counts.plus(**more)


def _is_whole(fd: int, offset: int, kind: int) -> bool:
    try:
        return form.read_head(fd, offset, 1 << 62, kind) is not None
    except OSError:
        return False
