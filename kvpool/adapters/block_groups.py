"""Tables of layer groups on a `BlockPool` that they share: the longest hit of all groups, and skipped prefixes.

An engine whose layers differ has a table and keys of its own for each group, for example ``(content, group)``, on one
pool of equal pages. Null blocks stand for what nobody reads; `BlockPool.touch`, `free` and `cache` pass them over.

    hit = longest_hit(pool, [GroupKeys(keys, 16), GroupKeys(tails, 16, "window", 64), GroupKeys(states, 512, "state")])
    for table in hit.tables:
        pool.touch(table)
    skip(pool, hit.tables[1], n)                # the window has passed the first n blocks
"""

from collections.abc import Hashable, Sequence
from math import lcm
from operator import index
from typing import NamedTuple

from kvpool.adapters.block_pool import BlockPool
from kvpool.config import checked_int


class GroupKeys(NamedTuple):
    """A prompt as one layer group knows it."""

    keys: Sequence[Hashable]  #: key i: content of the block that ends with, or is filled up to, token (i + 1) * grain
    block_size: int  #: tokens of a block
    kind: str = "full"  #: "full", "window", "chunk" or "state"
    size: int = 1  #: tokens of the window or chunk
    grain: int | None = None  #: tokens of a key: `block_size`, the default, or a divisor of it


class Hit(NamedTuple):
    """A prefix that every group has."""

    tokens: int  #: its length
    tables: list[list[int]]  #: per group the blocks of the prefix, null blocks for those that nobody reads


class _Prefix:
    """What the pool has of one group's keys."""

    def __init__(self, given: GroupKeys, pool: BlockPool) -> None:
        self.keys, self.kind, self.lookup, self.null_block = list(given.keys), given.kind, pool.lookup, pool.null_block
        if self.kind not in ("full", "window", "chunk", "state"):
            raise ValueError(f"[longest_hit] kind is {self.kind!r}: give 'full', 'window', 'chunk' or 'state'")
        self.block_size = checked_int("longest_hit", "block_size", given.block_size)
        self.size = checked_int("longest_hit", "size", given.size)
        self.grain = checked_int("longest_hit", "grain", self.block_size if given.grain is None else given.grain)
        if self.block_size % self.grain:
            raise ValueError(f"[longest_hit] grain is {self.grain}, which does not divide a block of {self.block_size}")
        self.per_block = self.block_size // self.grain
        self.num_tokens = len(self.keys) * self.grain
        self.ends = self.keys[self.per_block - 1 :: self.per_block]
        self.found = self.blocks_of(self.num_tokens)  # `longest` found all blocks from this one on

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks have these tokens."""
        return -(-tokens // self.block_size)

    def read_from(self, tokens: int) -> int:
        """Return the first token of a prefix that the next query reads, `tokens` if it reads none."""
        return {
            "full": 0,
            "window": max(0, tokens - self.size + 1),
            "chunk": tokens // self.size * self.size,
            "state": max(0, tokens - 1),
        }[self.kind]

    def at(self, tokens: int) -> list[int]:
        """Return the block that is filled up to here, in a list; an empty one if nobody has it."""
        end = tokens // self.grain
        return self.lookup(self.keys[end - 1 : end])

    def fullest(self, block: int) -> tuple[int, list[int]]:
        """Return the token up to which the fullest copy of a block is filled, and the copy."""
        begin = block * self.block_size
        for tokens in range(min(begin + self.block_size, self.num_tokens), begin, -self.grain):
            if copy := self.at(tokens):
                return tokens, copy
        return begin, []

    def longest(self, tokens: int, align: int) -> int:
        """Return the longest prefix of at most `tokens` that the group has."""
        if self.kind == "state":
            ends = lcm(align, self.grain)
            tokens -= tokens % ends
            while tokens and not self.at(tokens):
                tokens -= ends
            return tokens
        while True:
            begin = self.read_from(tokens)
            first, end = begin // self.block_size, min(self.found, self.blocks_of(tokens))
            short = first + len(self.lookup(self.ends[first:end]))
            reached = max(begin, self.fullest(short)[0]) if short < end else tokens
            if reached >= min(tokens, (short + 1) * self.block_size):
                self.found = min(self.found, self.blocks_of(begin))
                return tokens
            tokens = reached - reached % align

    def table(self, tokens: int) -> list[int]:
        """Return the blocks of a prefix that the group has."""
        begin, end = self.read_from(tokens), self.blocks_of(tokens)
        first = begin // self.block_size if begin < tokens else end
        blocks = self.at(tokens) if self.kind == "state" and tokens else self.lookup(self.ends[first:end])
        if first + len(blocks) < end:
            blocks += self.fullest(end - 1)[1]
        return [self.null_block] * first + blocks


def longest_hit(
    pool: BlockPool, groups: Sequence[GroupKeys], *, align: int | None = None, limit: int | None = None
) -> Hit:
    """Find the longest prefix of a prompt that all layer groups have, and its blocks in each.

    Nothing changes, so `BlockPool.touch` its tables before any other call.

    Parameters
    ----------
    pool : BlockPool
    groups : sequence of GroupKeys
        The same prompt for each group, with keys of its own.
    align : int, optional
        The length of a hit is a multiple of this. By default the least common multiple of all block sizes.
    limit : int, optional
        Most tokens of a hit, for example one less than the prompt has. By default what all groups have keys of.

    Returns
    -------
    Hit
        Each table has ``ceil(tokens / block_size)`` entries.

    Raises
    ------
    ValueError, TypeError
        No group; a kind that is not known; a grain that does not divide its block; a number that is none, or out
        of range.

    Notes
    -----
    A prefix of c tokens is a hit if each group has what a query at position c reads:

    - "full": all tokens before c. "window": those from c - size + 1 on. "chunk": those from the last multiple of
      size up to c on. A block with such tokens needs a cached key that ends in it, at or behind the last of them.
    - "state": the key that ends at c exactly, unless c is 0.

    A hit is partial where c is inside a block, which takes an `align` below the default. The last block is then
    filled up to c or further, and cached: copy it, and write to the copy. If nobody reads it, it is null: take a
    new one.
    """
    if not groups:
        raise ValueError("[longest_hit] there is no group, the least is 1")
    prompt = [_Prefix(group, pool) for group in groups]
    sizes = [group.block_size for group in prompt]
    align = lcm(*sizes) if align is None else checked_int("longest_hit", "align", align)
    tokens = min(group.num_tokens for group in prompt)
    if limit is not None:
        tokens = min(tokens, checked_int("longest_hit", "limit", limit, least=0))
    tokens -= tokens % align
    before = -1
    while tokens != before:
        before = tokens
        for group in sorted(prompt, key=lambda group: group.kind == "full"):  # they look at the most blocks
            tokens = group.longest(tokens, align)
    return Hit(tokens, [group.table(tokens) for group in prompt])


def skip(pool: BlockPool, table: list[int], n: int) -> list[int]:
    """Give back the first `n` blocks of a table, which no later token reads. Null blocks replace them.

    Those without a key are blank, those with one stay findable until they are taken, the last of them first. O(n).

    Parameters
    ----------
    pool : BlockPool
    table : list of int
        Changed in place. Null blocks in it are passed over.
    n : int
        0 .. len(table).

    Returns
    -------
    list of int
        What was given back, in the order in which it was.

    Raises
    ------
    ValueError
        `n` is out of range. Pool and table unchanged.
    DoubleFree, IndexError
        As `BlockPool.free`. Pool and table unchanged.
    """
    n = index(n)
    if not 0 <= n <= len(table):
        raise ValueError(f"[skip] n is {n}, the table has {len(table)} blocks")
    gone = [block for block in reversed(table[:n]) if block != pool.null_block]
    pool.free(gone)
    table[:n] = [pool.null_block] * n
    return gone
