"""The words of every store: `Layout` (what blocks hold), `Blocks` (which ones), `BlockStore` (the protocol).

A block is named by its content: the key of a prefix, cut to 16 bytes of a SHA-256 chain over the namespace and the
tokens, the same that ``pool.prefix.events()`` reports. With a key go the key of the block before it and the block's
own tokens. A store compares all of them before it says that it has loaded a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvpool.spec import checked_int

KEY_NBYTES = 16
MOST_GROUPS = 1024
Rows = np.ndarray | Sequence[np.ndarray]
"""The bytes of n blocks: uint8 ``[n, nbytes]``, or n contiguous arrays of so many bytes."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The contents of one record of a layer group."""

    #: Tokens of a block. A state group has the pool's grain: its record is the state after these tokens.
    block_size: int
    nbytes: int  #: bytes of a block as ``export_blocks`` returns it, all columns of it; or of a state
    #: Everything that gives these bytes their meaning: ``repr`` of the specs, kind of the group, dtype, bits. Two
    #: layouts with different texts share nothing.
    content: str

    def __post_init__(self) -> None:
        for name in ("block_size", "nbytes"):
            object.__setattr__(self, name, checked_int("BlockLayout", name, getattr(self, name)))
        if not isinstance(self.content, str):
            raise TypeError(f"[BlockLayout] content must be a str, got {type(self.content).__name__}")


@dataclass(frozen=True)
class Layout:
    """The contents of a store: the layer groups of one model with these weights.

    Parameters
    ----------
    groups : sequence of BlockLayout
        One per layer group, in the order of the pool. A model of one table has one.
    weights : bytes or str
        Fingerprint of the weights, and of whatever else decides the content of a block besides namespace and tokens.
    block_size : int, optional
        Tokens of a link of the key chain: the pool's block size. By default the smallest block of the groups.

    Raises
    ------
    TypeError, ValueError
        As ``[Layout] what is wrong (value), the limit``.
    """

    groups: tuple[BlockLayout, ...]
    weights: bytes | str
    block_size: int = 0

    def __post_init__(self) -> None:
        groups = tuple(self.groups)
        if not all(isinstance(group, BlockLayout) for group in groups):
            raise TypeError("[Layout] groups must be BlockLayouts")
        if not 1 <= len(groups) <= MOST_GROUPS:
            raise ValueError(f"[Layout] there are {len(groups)} groups, the range is 1 .. {MOST_GROUPS}")
        if not isinstance(self.weights, bytes | str):
            raise TypeError(f"[Layout] weights must be bytes or a str, got {type(self.weights).__name__}")
        block_size = checked_int("Layout", "block_size", self.block_size, 0)
        block_size = block_size or min(group.block_size for group in groups)
        for number, group in enumerate(groups):
            if group.block_size % block_size:
                raise ValueError(
                    f"[Layout] group {number} has blocks of {group.block_size} tokens, no multiple of {block_size}"
                )
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "block_size", block_size)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The layout in words, for people and for `digest`."""
        weights = self.weights if isinstance(self.weights, bytes) else self.weights.encode()
        groups = [f"{group.block_size} tokens, {group.nbytes} bytes: {group.content}" for group in self.groups]
        return (f"keys of {self.block_size} tokens, weights {weights.hex()}", *groups)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two layouts share only if they are equal."""
        return digest_of(self.lines)

    def blocks(self, tokens: Any, namespace: bytes = b"", key: bytes | None = None) -> tuple[Blocks, ...]:
        """Name the full blocks of a prompt: for each group its blocks, first to last.

        With `key`, that of the block before them, they go on from there: whole blocks of every group stand before.
        A caller takes what it means: ``blocks[0][held:]`` of a full group, the last few of a window, and of a state
        group the one block that ends at the checkpoint.
        """
        tokens = _checked_tokens("blocks", tokens)
        keys = prefix_keys(tokens, self.block_size, namespace, key)
        digest = hashlib.sha256(namespace).digest()[:KEY_NBYTES]
        found = []
        for number, group in enumerate(self.groups):
            step, count = group.block_size // self.block_size, len(tokens) // group.block_size
            own = tokens[: count * group.block_size].reshape(count, group.block_size)
            parents = keys[: count * step : step]
            found.append(Blocks(keys[step::step][:count], parents, own, digest, number))
        return tuple(found)


def prefix_keys(tokens: Any, block_size: int, namespace: bytes = b"", key: bytes | None = None) -> np.ndarray:
    """Return the keys of all full blocks of a prompt, uint8 ``[1 + n, 16]``.

    Row 0 stands for the namespace, or is `key`, that of the block before the tokens.
    """
    tokens = _checked_tokens("prefix_keys", tokens)
    if not isinstance(namespace, bytes):
        raise TypeError(f"[prefix_keys] namespace must be bytes, got {type(namespace).__name__}")
    if key is None:
        key = hashlib.sha256(namespace).digest()[:KEY_NBYTES]
    elif not isinstance(key, bytes) or len(key) != KEY_NBYTES:
        raise ValueError(f"[prefix_keys] key must be {KEY_NBYTES} bytes, got {key!r}")
    keys, data = [key], memoryview(tokens).cast("B")
    for end in range(4 * block_size, len(data) + 1, 4 * block_size):
        key = hashlib.sha256(key + data[end - 4 * block_size : end]).digest()[:KEY_NBYTES]
        keys.append(key)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_NBYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The names of n blocks of one layer group. `Layout.blocks` makes them."""

    keys: np.ndarray  #: uint8 ``[n, 16]``, of the prefix up to the end of each block
    parents: np.ndarray  #: uint8 ``[n, 16]``, of the prefix up to its beginning
    tokens: np.ndarray  #: int32 ``[n, block_size]``, of the block alone
    namespace: bytes  #: digest of the namespace, 16 bytes
    group: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: slice | Sequence[int] | np.ndarray) -> Blocks:
        """Some of them: a slice, indices, or a mask."""
        return Blocks(self.keys[which], self.parents[which], self.tokens[which], self.namespace, self.group)


class TierStats(NamedTuple):
    """Counters of one tier of a store. A gauge says how it is now, the others grow."""

    blocks: int = 0  #: gauge: blocks that it has
    nbytes: int = 0  #: gauge: bytes that it takes
    limit_nbytes: int = 0  #: gauge: most bytes that it may take now; 0 where the limit is another's
    queued_nbytes: int = 0  #: gauge: bytes that wait to be written
    hits: int = 0  #: blocks loaded
    hit_nbytes: int = 0  #: bytes of these
    misses: int = 0  #: blocks asked for that it did not have
    damaged: int = 0  #: records found that were not what their name says: damaged, planted, a collision
    stored: int = 0  #: blocks that it took
    stored_nbytes: int = 0  #: bytes of these
    written_nbytes: int = 0  #: bytes that it wrote for them: payload, headers, footers
    dropped: int = 0  #: blocks that it did not take, or lost before they were written
    evicted: int = 0  #: blocks that left to make room
    errors: int = 0  #: calls of the system or the server that failed
    write_seconds: float = 0.0  #: CPU time of the thread that writes
    reserve_nbytes: int = 0  #: gauge: free bytes of the disk that it leaves to others

    def plus(self, **more: int) -> TierStats:
        """These counters, some of them larger by so much."""
        return self._replace(**{name: getattr(self, name) + count for name, count in more.items()})


@runtime_checkable
class BlockStore(Protocol):
    """Blocks of one layout, by their content. Any thread may call any method.

    Arguments that do not fit the layout raise `ValueError`, wrong types `TypeError`, before anything is changed. A
    disk or a server never raises: what cannot be read is a miss, what cannot be written is dropped, and both are
    counted. After `close` everything is a miss.
    """

    layout: Layout

    def lookup(self, blocks: Blocks) -> np.ndarray:
        """Which of these blocks are probably here, bool ``[n]``.

        Cheap: a tier in memory or on disk asks its index in memory, a server is asked once. Tokens are not compared.
        """

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        """Fill `rows` with the bytes of these blocks and return which were loaded, bool ``[n]``.

        A block is loaded only if key, parent, tokens, namespace, group, layout and checksum of its record are right. A
        row that was not loaded may hold anything.
        """

    def store(self, blocks: Blocks, rows: Rows) -> int:
        """Take copies of these blocks and return how many are kept or waiting to be written. It never waits."""

    def touch(self, blocks: Blocks) -> None:
        """Say that these blocks were of use elsewhere, so that they leave later."""

    def drain(self, timeout: float = 60.0) -> bool:
        """Wait until everything taken is written or dropped. False: not within `timeout` seconds."""

    def stats(self) -> dict[str, TierStats]:
        """Counters of each tier, fastest first, by its name."""

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and let go of everything. A second call does nothing."""


def leading(found: np.ndarray) -> int:
    """The number of blocks from the first on that were found."""
    return len(found) if found.all() else int(np.argmin(found))


def _checked_tokens(call: str, given: Any) -> np.ndarray:
    tokens = np.asarray(given)
    if tokens.ndim != 1:
        raise ValueError(f"[{call}] tokens must have shape [n], got {list(tokens.shape)}")
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TypeError(f"[{call}] tokens must be integers, got {tokens.dtype}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31:
        raise ValueError(f"[{call}] tokens are {tokens.min()} .. {tokens.max()}, the range is 0 .. 2^31 - 1")
    return np.ascontiguousarray(tokens, "<i4")


def digest_of(lines: Iterable[str]) -> bytes:
    """Return the digest of a layout with these lines."""
    framed = b"".join(len(line).to_bytes(8, "little") + line for line in map(str.encode, lines))
    return hashlib.sha256(framed).digest()[:KEY_NBYTES]


def checked_layout(call: str, layout: Any) -> Layout:
    """`layout`, if it is one."""
    if not isinstance(layout, Layout):
        raise TypeError(f"[{call}] layout must be a Layout, got {type(layout).__name__}")
    return layout


def checked(call: str, layout: Layout, blocks: Blocks, rows: Rows | None = None, writable: bool = False) -> None:
    """Raise unless blocks, and rows if given, fit the layout."""
    if not isinstance(blocks, Blocks):
        raise TypeError(f"[{call}] blocks must be Blocks, got {type(blocks).__name__}")
    if not 0 <= blocks.group < len(layout.groups):
        raise ValueError(f"[{call}] group is {blocks.group}, the layout has {len(layout.groups)} groups")
    own, count = layout.groups[blocks.group], len(blocks.keys)
    for name, width in ("keys", KEY_NBYTES), ("parents", KEY_NBYTES), ("tokens", own.block_size):
        array, dtype = getattr(blocks, name), "int32" if name == "tokens" else "uint8"
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            raise TypeError(f"[{call}] {name} must be an array of {dtype}")
        if array.shape != (count, width):
            raise ValueError(f"[{call}] {name} must have shape {[count, width]}, got {list(array.shape)}")
    if len(blocks.namespace) != KEY_NBYTES:
        raise ValueError(f"[{call}] namespace has {len(blocks.namespace)} bytes, a digest has {KEY_NBYTES}")
    if rows is None:
        return
    if len(rows) != count:
        raise ValueError(f"[{call}] there are {len(rows)} rows, one for each of {count} blocks is needed")
    for row in rows[:1] if isinstance(rows, np.ndarray) else rows:
        if not isinstance(row, np.ndarray) or row.dtype != np.uint8:
            raise TypeError(f"[{call}] rows must be arrays of uint8")
        if row.shape != (own.nbytes,) or not row.flags.c_contiguous:
            raise ValueError(f"[{call}] rows must be contiguous, {own.nbytes} bytes each, got shape {list(row.shape)}")
        if writable and not row.flags.writeable:
            raise ValueError(f"[{call}] rows are read-only, they are written to")
