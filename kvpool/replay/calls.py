"""The calls that a pool recorded (``Pool(..., record=N)``): to a file, from a file, and as calls again.

A file is ``KVCALLS3``, the length of a JSON header (uint32, little-endian), the header (version of kvpool, parameters
of the pool, numbers of calls kept and lost, digest at the end), the words of the ring, and the CRC-32 of all of it. A
call is a word of 32 bits that names it and has its flags, the low 32 bits of the pool's digest after it, and what it
was given; `kvpool/core/record.pxi` says how.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvpool
from kvpool.errors import KVPoolError

MAGIC = b"KVCALLS3"
NAMES = {  # the enums of kvpool/core/types.pxd and kvpool/core/record.pxd
    1: "blocks.alloc", 2: "blocks.incref", 3: "blocks.decref", 4: "blocks.free", 5: "prefix.commit", 7: "blocks.evict",
    8: "blocks.drain_evicted", 9: "open",
    10: "fork", 11: "truncate", 12: "close", 13: "step", 14: "reserve", 15: "rollback", 16: "done", 18: "compact",
    19: "evict_blocks", 20: "unshare",
    23: "blocks.take", 24: "blocks.take_block", 25: "blocks.touch", 26: "blocks.release", 27: "blocks.mark_cached",
    28: "blocks.uncache", 32: "start",
    33: "prefix.flush", 34: "close_finished", 35: "defer_close",
}  # fmt: skip
SAME_ROWS, PARTIAL, ONE_EACH = 1, 2, 4
PIN, COUNT, ALL, OLDEST = 1, 2, 1, 1
NARROW, WIDE, SCALAR, WIDE_SCALAR = range(4)


class RecordError(KVPoolError, ValueError):
    """A file is no record of calls, or is damaged; the message says where."""


@dataclass(frozen=True)
class Call:
    """One call that changed the pool."""

    name: str
    arguments: dict[str, Any]
    digest: int  # low 32 bits, after the call

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({shown if len(shown) <= 100 else shown[:97] + '...'})"


@dataclass(frozen=True)
class Calls:
    """What a file holds. `begins`: the call at which a replay can begin, None when none is left."""

    header: dict[str, Any]
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def begins(self) -> int | None:
        """0 when nothing was lost, else behind the oldest reset that is left."""
        if not self.header["lost"]:
            return 0
        return next((i for i, call in enumerate(self.calls) if call.name == "start"), None)


def save(pool: kvpool.Pool, path: str | Path) -> int:
    """Write what the pool has recorded to a file; returns how many calls that are.

    Raises
    ------
    ValueError
        The pool does not record.
    """
    body, kept, lost = pool._recorded()
    if not body and not lost:
        raise ValueError("[save] the pool has recorded nothing; make it with record=BYTES")
    parameters = pool.options._asdict()
    header = {
        "kvpool": kvpool.__version__, "pool": parameters, "calls": kept, "lost": lost, "digest": pool.digest(),
    }  # fmt: skip
    text = json.dumps(header).encode()
    data = MAGIC + struct.pack("<I", len(text)) + text + body
    Path(path).write_bytes(data + struct.pack("<I", zlib.crc32(data)))
    return int(kept)


def load(path: str | Path) -> Calls:
    """Read a file of calls.

    Raises
    ------
    RecordError
        The file is none of ours, from another format, cut short or changed; the message says where.
    OSError
        It cannot be read.
    """
    data, name = Path(path).read_bytes(), Path(path).name
    if data[:7] != MAGIC[:7]:
        raise RecordError(f"{name}: not a record of calls (it begins with {data[:8]!r})")
    if data[:8] != MAGIC:
        raise RecordError(f"{name}: format {data[7:8]!r}, this kvpool reads {MAGIC[7:]!r}")
    if len(data) < 16:
        raise RecordError(f"{name}: cut short, {len(data)} bytes")
    (size,) = struct.unpack_from("<I", data, 8)
    if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise RecordError(f"{name}: cut short or changed: the checksum of its {len(data)} bytes does not agree")
    try:
        header = json.loads(data[12 : 12 + size])
        calls = tuple(parse(data[12 + size : -4], 12 + size))
        expected, _, _ = int(header["calls"]), int(header["lost"]), dict(header["pool"])
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{name}: its header cannot be read ({error!r})") from None
    if len(calls) != expected:
        raise RecordError(f"{name}: {len(calls)} calls, its header says {expected}")
    return Calls(header, calls)


class _Reader:
    """Numbers out of words of 32 bits."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data, self.at, self.offset = data, 0, offset

    def unpack(self, kind: str, size: int) -> list[int]:
        """So many numbers of a kind of `struct`."""
        length = struct.calcsize(f"<{kind}")
        if size > (len(self.data) - self.at) // length:
            raise RecordError(f"{size} numbers at byte {self.offset + self.at}, the record ends before")
        found = struct.unpack_from(f"<{size}{kind}", self.data, self.at)
        self.at += size * length
        return list(found)

    def number(self) -> int:
        """A word."""
        return self.unpack("I", 1)[0]

    def wide(self) -> int:
        """A number of two words."""
        return self.unpack("q", 1)[0]

    def batch(self) -> int | list[int]:
        """Integers, or one for all."""
        (head,) = self.unpack("i", 1)
        kind, value = head & 3, head >> 2
        if kind in (SCALAR, WIDE_SCALAR):
            return value if kind == SCALAR else self.wide()
        return self.unpack("q" if kind == WIDE else "i", value & (1 << 30) - 1)

    def text(self) -> bytes:
        """So many bytes, to the next whole word."""
        at, size = self.at + 4, self.number()
        self.unpack("I", (size + 3) // 4)
        return self.data[at : at + size]


def parse(data: bytes, offset: int) -> Iterator[Call]:
    """The calls in the bytes of a ring."""
    read = _Reader(data, offset)
    while read.at < len(data):
        at = read.at
        head, digest = read.unpack("I", 2)
        name = NAMES.get(head & 255)
        if name is None:
            raise RecordError(f"no such call ({head & 255}) at byte {offset + at}")
        yield Call(name, _arguments(read, name, head >> 8), digest)


def _arguments(read: _Reader, name: str, flags: int) -> dict[str, Any]:
    """What `kvpool/core/record.pxi` wrote after the name of a call."""
    if name in ("blocks.evict", "blocks.drain_evicted"):
        return {"n": read.wide()}
    if name.startswith("blocks."):
        return {"ids": read.batch()} | ({"oldest": bool(flags & OLDEST)} if name == "blocks.release" else {})
    if name in ("done", "rollback"):
        return {"plan": read.wide()}
    if name == "defer_close":
        return {"rows": [read.wide()]}
    if name == "close":
        return {"rows": read.batch()}
    if name == "truncate":
        return {"rows": read.batch(), "lens": read.batch()}
    if name == "compact":
        return {"first": read.wide(), "rows": read.batch(), "lens": read.batch()}
    if name == "unshare":
        return {"plan": read.number(), "first": read.wide(), "rows": read.batch(), "lens": read.batch()}
    if name == "evict_blocks":
        return {"row": read.number(), "indices": read.batch()}
    if name == "close_finished":
        return {"rows": read.batch(), "mask": list(read.text())}
    if name == "fork":
        return {"row": read.number(), "children": read.unpack("I", read.number())}
    if name == "prefix.commit":
        return {"rows": read.batch(), "counts": read.batch(), "tokens": read.batch()}
    if name == "prefix.flush":
        return {"namespace": None if flags & ALL else read.text().hex()}
    if name == "open":
        row, namespace = read.number(), read.text().hex()
        tokens = read.wide() if flags & COUNT else read.batch()
        return {"row": row, "pin": bool(flags & PIN), "namespace": namespace, "tokens": tokens}
    if name == "start":
        digest, dropped = read.unpack("Q", 1)[0], read.batch()
        pairs = read.unpack("I", 2 * read.number())
        return {"digest": digest, "dropped": dropped, "generations": list(zip(pairs[::2], pairs[1::2], strict=True))}
    number, named = read.number(), None if flags & SAME_ROWS else read.batch()
    new = 1 if flags & ONE_EACH else read.batch()
    return {"plan": number, "rows": named, "num_new": new, "partial": bool(flags & PARTIAL)}
