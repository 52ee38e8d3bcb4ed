"""The directory of a `DiskStore`: who may use it, which files are segments, how much may be written.

Processes that share it make room, create a segment and take over one whose writer has died under a lock on ``lock``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import NamedTuple

from kvpool.store.blocks import Layout
from kvpool.store.segment_format import VERSION

SEALED, GROWING = ".kvpool", ".kvpool-open"
NEW = ".new"  # of a small file, until it has its name
_SEGMENT = re.compile(r"([0-9a-f]{16})(\.kvpool|\.kvpool-open)")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
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
        self._place = os.path.abspath(self.path)  # the process may change its directory
        if create:
            with suppress(FileExistsError):
                os.makedirs(self.path, mode=0o700)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(f"[{call}] there is no directory {self.path}") from None
        except OSError as error:
            raise NotADirectoryError(f"[{call}] {self.path} is not a directory, or a link ({error.strerror})") from None
        self._lock_fd: int | None = None
        try:
            self._check_owner(os.fstat(self.fd), self.path, "chmod 700")
            made = os.O_CREAT if create else 0
            try:
                self._lock_fd = self.open("lock", os.O_RDWR | made | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                if create and error.errno is None:  # it was opened, and is not a file of ours
                    raise
                if create and error.errno not in (errno.EROFS, errno.EACCES):
                    text = f"[{call}] {self.path}/lock cannot be opened: {error.strerror}"
                    raise OSError(error.errno, text) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def is_read_only(self) -> bool:
        return self._lock_fd is None

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

        Other threads may be about to open files in the old one, so the new one gets its descriptors.
        """
        with Folder(self._place, self._call) as new:
            if new._lock_fd is None or self._lock_fd is None:
                raise PermissionError(f"[{self._call}] {self.path} is read-only")
            new.check_layout(layout)
            os.dup2(new.fd, self.fd, inheritable=False)
            os.dup2(new._lock_fd, self._lock_fd, inheritable=False)

    def close(self) -> None:
        for fd in (self.fd, self._lock_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.fd, self._lock_fd = -1, None

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
            why = f"{held} bytes are in use, the limit is {max_nbytes}"
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
        if self._lock_fd is None:
            raise PermissionError(f"[{self._call}] {self.path} is read-only")
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"[{self._call}] another process holds {self.path}/lock") from None
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def read_json(self, name: str) -> dict[str, object]:
        """The content of a small file; ValueError if it is damaged."""
        fd = self.open(name)
        try:
            found = json.loads(os.read(fd, 1 << 20))
        except RecursionError:
            raise ValueError("brackets without end") from None
        finally:
            os.close(fd)
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found

    def write_json(self, name: str, content: dict[str, object], *, sync: bool = False) -> None:
        """Replace a small file as a whole. With `sync` it is whole after a loss of power too. With the lock."""
        temporary = name + NEW
        self.remove(temporary)  # of a process that was killed
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self.fd)
        try:
            data = json.dumps(content, indent=1).encode()
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, f"[{self._call}] the disk is full")
            if sync:
                os.fsync(fd)
            os.replace(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            raise
        finally:
            os.close(fd)

    def check_layout(self, layout: Layout) -> None:
        """Write down what the records here hold; ValueError if they hold something else."""
        own: dict[str, object] = {"version": VERSION, "layout": layout.digest.hex(), "text": list(layout.lines)}
        try:
            there = self.read_json("layout.json")
        except FileNotFoundError:
            if self.is_read_only:
                return
            with self.lock():
                try:
                    os.stat("layout.json", dir_fd=self.fd, follow_symlinks=False)
                except FileNotFoundError:
                    return self.write_json("layout.json", own, sync=True)
            return self.check_layout(layout)  # another process was faster
        except ValueError:
            raise ValueError(
                f"[{self._call}] {self.path}/layout.json is damaged; delete the directory, or restore the file"
            ) from None
        if there.get("version") != VERSION:
            raise ValueError(
                f"[{self._call}] {self.path} has format version {there.get('version')!r}, this kvpool knows {VERSION}"
            )
        if there.get("layout") != own["layout"]:
            text = there.get("text")
            lines = zip_longest(text if isinstance(text, list) else [], layout.lines, fillvalue="?")
            first, own_line = next((pair for pair in lines if pair[0] != pair[1]), ("?", layout.lines[0]))
            raise ValueError(
                f"[{self._call}] {self.path} is a store of another model or layout ({first}), not of this one "
                f"({own_line}); take another directory"
            )
