"""Segment files: their bytes, and nothing else. docs/store.md has the format byte by byte.

    segment = header, record ..., and once it is sealed: footer, trailer
    record  = head (fields, tokens), payload

All numbers are little-endian; everything begins at a multiple of 64 bytes, and what lies between is zero.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from kvpool.errors import install_command
from kvpool.store.blocks import KEY_NBYTES, Blocks, Layout

_xxhash: Any = import_module("xxhash") if find_spec("xxhash") else None  # the extra `store`
VERSION = 1
ALIGNMENT = 64
XXH3, CRC32 = 1, 2  # kinds of checksums
KIND = CRC32 if _xxhash is None else XXH3  # of what is written: without the package CRC-32 of the standard library
HEADER = struct.Struct("<8sII16s24xQ")  # magic, version, kind of checksums, layout; checksum
RECORD = struct.Struct("<8sII16s16s16s16sIIQQ16xQ")  # see Head
TRAILER = struct.Struct("<8sII16sQQQQ")  # magic, version, kind, layout, records, end of records, checksums: footer, own
FOOTER = np.dtype([("name", "<u8"), ("offset", "<u8")])
HEADER_MAGIC, RECORD_MAGIC, TRAILER_MAGIC = b"kvpoolsg", b"kvrecord", b"kvpoolfo"
MOST_TOKENS, MOST_NBYTES = 1 << 20, 1 << 40  # of a record: beyond them a head is damaged
MOST_SEGMENT = ALIGNMENT << 32  # bytes: a place has 32 bits for an offset
MOST_RECORD = 0x7FFFF000  # bytes that Linux reads or writes in one call
_GROUP_STEP = 0x9E3779B97F4A7C15  # odd: groups of one key have different names
_KEY_AT = 48  # in a record
_FIELDS_NBYTES = RECORD.size - 32  # of a record without its checksums, and the zeros between them


class UnknownFormat(ValueError):
    """A segment has a version, or a kind of checksums, that this process cannot read. Another one may."""


class Head(NamedTuple):
    """The fields of a record."""

    magic: bytes
    version: int
    group: int
    layout: bytes
    namespace: bytes
    key: bytes
    parent: bytes
    num_tokens: int
    zero: int
    nbytes: int  # of the payload
    payload_checksum: int
    checksum: int  # of the other fields, and of the tokens

    @property
    def end(self) -> int:
        """Bytes of the record."""
        return head_nbytes(self.num_tokens) + aligned(self.nbytes)


def checksum(kind: int, *parts: Any) -> int:
    """Return the checksum of these bytes, one part after the other."""
    if kind == XXH3:
        if len(parts) == 1:
            return int(_xxhash.xxh3_64_intdigest(parts[0]))
        state = _xxhash.xxh3_64()
        for part in parts:
            state.update(part)
        return int(state.intdigest())
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def can_check(kind: int) -> bool:
    """Whether checksums of this kind can be computed here."""
    return kind == CRC32 or (kind == XXH3 and _xxhash is not None)


def aligned(nbytes: int) -> int:
    """Round up to where the next thing begins."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def head_nbytes(num_tokens: int) -> int:
    """Bytes of the head of a record."""
    return RECORD.size + aligned(4 * num_tokens)


def check_sizes(call: str, layout: Layout, most_nbytes: int) -> None:
    """Raise `ValueError` if a record of this layout has more than `most_nbytes`, or more tokens than a head may say."""
    for number, group in enumerate(layout.groups):
        if group.block_size > MOST_TOKENS:
            raise ValueError(
                f"[{call}] group {number} has blocks of {group.block_size} tokens, the limit is {MOST_TOKENS}"
            )
        nbytes = head_nbytes(group.block_size) + aligned(group.nbytes)
        if nbytes > most_nbytes:
            raise ValueError(f"[{call}] a record of group {number} has {nbytes} bytes, the limit is {most_nbytes}")


def names_of(keys: np.ndarray, group: int) -> np.ndarray:
    """8 bytes of each key ``[n, 16]``, uint64, different in each group: what an index looks for."""
    first = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
    return np.asarray(first ^ np.uint64(group * _GROUP_STEP % 2**64), np.uint64)


def expected_heads(layout: bytes, blocks: Blocks, nbytes: int) -> list[tuple[bytes, bytes]]:
    """Return what a load compares: for each block the fields of its record up to the checksums, and its tokens."""
    count, num_tokens = blocks.tokens.shape
    fixed = (RECORD_MAGIC, VERSION, blocks.group, layout, blocks.namespace, b"", b"", num_tokens, 0, nbytes, 0, 0)
    heads, size = np.zeros((count, head_nbytes(num_tokens)), np.uint8), head_nbytes(num_tokens)
    heads[:, : RECORD.size] = np.frombuffer(RECORD.pack(*fixed), np.uint8)
    heads[:, _KEY_AT : _KEY_AT + KEY_NBYTES] = blocks.keys
    heads[:, _KEY_AT + KEY_NBYTES : _KEY_AT + 2 * KEY_NBYTES] = blocks.parents
    heads[:, RECORD.size : RECORD.size + 4 * num_tokens] = np.ascontiguousarray(blocks.tokens, "<i4").view(np.uint8)
    data = heads.tobytes()
    return [(data[at : at + _FIELDS_NBYTES], data[at + RECORD.size : at + size]) for at in range(0, count * size, size)]


def packed_header(layout: bytes) -> bytes:
    """The first bytes of a segment."""
    fields = HEADER.pack(HEADER_MAGIC, VERSION, KIND, layout, 0)[:-8]
    return fields + checksum(KIND, fields).to_bytes(8, "little")


def packed_record(fields: bytes, tokens: bytes, payload: np.ndarray) -> bytes:
    """Return the head of a record: one of `expected_heads`, with the checksums of this payload."""
    fields += checksum(KIND, payload).to_bytes(8, "little") + bytes(16)
    return fields + checksum(KIND, fields, tokens).to_bytes(8, "little") + tokens


def packed_footer(layout: bytes, entries: np.ndarray, end: int, kind: int) -> bytes:
    """The footer and trailer of a segment whose records end at `end`."""
    footer = entries.astype(FOOTER, copy=False).tobytes()
    own = checksum(kind, footer)
    fields = TRAILER.pack(TRAILER_MAGIC, VERSION, kind, layout, len(entries), end, own, 0)[:-8]
    return footer.ljust(aligned(len(footer)), b"\0") + fields + checksum(kind, fields).to_bytes(8, "little")


def is_right(kind: int, head: bytes | bytearray, fields: bytes, tokens: bytes, payload: Any) -> bool:
    """Whether a record that was read is the one that `expected_heads` describes."""
    if head[: len(fields)] != fields or head[RECORD.size :] != tokens:
        return False
    return checksum(kind, payload) == int.from_bytes(head[len(fields) : len(fields) + 8], "little")


def read_header(fd: int) -> tuple[int, bytes]:
    """Return kind of checksums and layout of a segment; ValueError says what is wrong with it."""
    data = os.pread(fd, HEADER.size, 0)
    if len(data) < HEADER.size or data[:8] != HEADER_MAGIC:
        raise ValueError("this is not a segment")
    _, version, kind, layout, own = HEADER.unpack(data)
    if version != VERSION:
        raise UnknownFormat(f"the version is {version}, this kvpool reads {VERSION}")
    if not can_check(kind):
        need = f"the package xxhash is needed ({install_command('store')})"
        raise UnknownFormat(f"checksums are of kind {kind}, {need}")
    if checksum(kind, data[:-8]) != own:
        raise ValueError("the header is damaged")
    return kind, layout


def read_head(fd: int, offset: int, size: int, kind: int) -> tuple[Head, bytes] | None:
    """Return a whole record's fields and tokens, None if there is none at this offset."""
    if offset + RECORD.size > size:
        return None
    data = os.pread(fd, RECORD.size, offset)
    if len(data) < RECORD.size or data[:8] != RECORD_MAGIC:
        return None
    head = Head(*RECORD.unpack(data))
    if head.num_tokens > MOST_TOKENS or head.nbytes > MOST_NBYTES or offset + head.end > size:
        return None
    tokens = os.pread(fd, head_nbytes(head.num_tokens) - RECORD.size, offset + RECORD.size)
    if head.version != VERSION or checksum(kind, data[:-8], tokens) != head.checksum:
        return None
    return head, tokens


def read_footer(fd: int, size: int, layout: bytes) -> tuple[np.ndarray, int] | None:
    """Return the entries of a sealed segment and where its records end; None if it has no whole footer."""
    if size < HEADER.size + TRAILER.size:
        return None
    data = os.pread(fd, TRAILER.size, size - TRAILER.size)
    if len(data) < TRAILER.size or data[:8] != TRAILER_MAGIC:
        return None
    _, version, kind, own, count, end, of_footer, of_trailer = TRAILER.unpack(data)
    if version != VERSION or own != layout or not can_check(kind) or checksum(kind, data[:-8]) != of_trailer:
        return None
    if end + aligned(count * FOOTER.itemsize) + TRAILER.size != size:
        return None
    footer = os.pread(fd, count * FOOTER.itemsize, end)
    if len(footer) != count * FOOTER.itemsize or checksum(kind, footer) != of_footer:
        return None
    entries = np.frombuffer(footer, FOOTER)
    is_sound = not (entries["offset"] % ALIGNMENT).any() and entries["offset"].max(initial=0) < end
    return (entries, end) if is_sound else None


def scanned(fd: int, begin: int, size: int, kind: int, is_ours: Callable[[Head], bool]) -> tuple[np.ndarray, int]:
    """The result of `read_footer`, made from the records: those that are ours, up to the first that is not whole."""
    names, offsets, end = [], [], begin
    while (found := read_head(fd, end, size, kind)) is not None:
        head = found[0]
        if is_ours(head):
            names.append(name_of(head.key, head.group))
            offsets.append(end)
        end += head.end
    entries = np.zeros(len(names), FOOTER)
    entries["name"], entries["offset"] = names, offsets
    return entries, end


def examine(fd: int, size: int, is_sealed: bool, payloads: bool = True) -> Iterator[tuple[int, Head | None, str]]:
    """Read a segment, without `payloads` heads and footer only. Yield offset, fields and what is wrong of each record.

    An empty text: nothing is. What is wrong elsewhere comes without fields. Where a head is damaged, the footer says
    where the next record is. A segment that grows ends with its last whole record: what is behind it is being written,
    or never was. OSError and ValueError say that it cannot be read at all.
    """
    kind, layout = read_header(fd)
    footer = read_footer(fd, size, layout) if is_sealed else None
    listed = {} if footer is None else {offset: name for name, offset in footer[0].tolist()}
    offset, end = HEADER.size, size if footer is None else footer[1]
    while offset < end:
        found = read_head(fd, offset, end, kind)
        if found is None:
            if not is_sealed:
                return
            yield offset, None, "there is no whole record"
            offset = min((later for later in listed if later > offset), default=end)
            continue
        head, begin = found[0], offset + head_nbytes(found[0].num_tokens)
        data = os.pread(fd, offset + head.end - begin, begin) if payloads else b""
        wrong = ""
        if head.layout != layout:
            wrong = "the layout is not that of the segment"
        elif payloads and checksum(kind, data[: head.nbytes]) != head.payload_checksum:
            wrong = "the payload is damaged"
        elif any(data[head.nbytes :]):
            wrong = "the zeros behind the payload are damaged"
        elif footer is not None and listed.get(offset) != name_of(head.key, head.group):
            wrong = "the footer does not list the record, or by another name"
        yield offset, head, wrong
        offset += head.end
    if is_sealed and footer is None:
        yield end, None, "there is no whole footer"
    elif footer is not None:
        zeros = end + len(listed) * FOOTER.itemsize
        if any(os.pread(fd, size - TRAILER.size - zeros, zeros)):
            yield zeros, None, "the zeros behind the footer are damaged"


def name_of(key: bytes, group: int) -> int:
    """`names_of` for one key."""
    return int.from_bytes(key[:8], "little") ^ group * _GROUP_STEP % 2**64


class Index:
    """Index of blocks: 16 bytes for each, sorted by name, and a dict of those in segments that grow.

    A place is ``segment << 32 | offset / 64``. A name is 8 bytes of a key; the record proves the rest.
    """

    NOWHERE = 2**64 - 1

    def __init__(self) -> None:
        self._names = np.zeros(0, np.uint64)
        self._places = np.zeros(0, np.uint64)
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._names) + len(self._recent)

    def find(self, names: np.ndarray) -> np.ndarray:
        """Return the place of each name, NOWHERE if it has none."""
        places = np.full(len(names), self.NOWHERE, np.uint64)
        if len(self._names):
            at = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
            found = self._names[at] == names
            places[found] = self._places[at[found]]
        if self._recent:
            for number, name in enumerate(names.tolist()):
                if (place := self._recent.get(name)) is not None:
                    places[number] = place
        return places

    def add(self, name: int, segment: int, offset: int) -> None:
        """A record was appended to a segment that grows."""
        self._recent[name] = segment << 32 | offset // ALIGNMENT

    def merge(self, entries: dict[int, np.ndarray]) -> None:
        """Take the footers of segments that do not grow any more, by their number; what was there of a name goes."""
        self._recent = {name: place for name, place in self._recent.items() if place >> 32 not in entries}
        names, places = [self._names], [self._places]
        for segment, footer in entries.items():
            names.append(footer["name"])
            places.append(np.uint64(segment << 32) | footer["offset"] // np.uint64(ALIGNMENT))
        joined, where = np.concatenate(names), np.concatenate(places)
        order = np.argsort(joined, kind="stable")
        joined, where = joined[order], where[order]
        last = np.append(joined[1:] != joined[:-1], True)[: len(joined)]
        last &= where != self.NOWHERE
        self._names, self._places = joined[last], where[last]

    def drop(self, segment: int) -> int:
        """Forget everything in a segment; return how many blocks."""
        before = len(self)
        stays = self._places >> np.uint64(32) != segment
        self._names, self._places = self._names[stays], self._places[stays]
        self._recent = {name: place for name, place in self._recent.items() if place >> 32 != segment}
        return before - len(self)

    def forget(self, name: int, place: int) -> None:
        """Forget one block, if it is still there."""
        if self._recent.get(name) == place:
            del self._recent[name]
        at = int(np.searchsorted(self._names, np.uint64(name)))
        if at < len(self._names) and self._names[at] == name and self._places[at] == place:
            self._places[at] = self.NOWHERE


assert RECORD.size == 128 and HEADER.size == TRAILER.size == ALIGNMENT and KEY_NBYTES == 16
