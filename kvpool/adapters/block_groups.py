"""Tables of layer groups that share one `BlockPool`: the longest prefix that all groups have, and windows.

An engine whose layers differ has a table and keys for each group, for example keys ``(content, group)``. Null blocks
stand for blocks that nobody reads. `BlockPool.touch`, `free` and `cache` ignore them.

    hit = longest_hit(pool, [GroupKeys(keys, 16), GroupKeys(tails, 16, "window", 64), GroupKeys(states, 512, "state")])
    for table in hit.tables:
        pool.touch(table)
    skip(pool, hit.tables[1], n)                # no later token reads the first n blocks
"""

from collections.abc import Hashable, Sequence
from math import lcm
from operator import index
from typing import NamedTuple

from kvpool.adapters.block_pool import BlockPool
from kvpool.config import checked_int


class GroupKeys(NamedTuple):
    """The keys of a prompt in one layer group."""

    keys: Sequence[Hashable]  #: key i names the block that is filled up to token (i + 1) * grain
    block_size: int  #: tokens of a block
    kind: str = "full"  #: "full", "window", "chunk" or "state"
    size: int = 1  #: tokens of the window or chunk
    grain: int | None = None  #: tokens per key: `block_size` (the default) or a divisor of it


class Hit(NamedTuple):
    """A prefix that every group has."""

    tokens: int  #: its length
    tables: list[list[int]]  #: of each group, with null blocks for blocks that nobody reads


class _Prefix:
    """Finds the blocks of one group's keys in the pool."""

    def __init__(self, given: GroupKeys, pool: BlockPool) -> None:
        self.keys, self.kind, self.lookup, self.null_block = list(given.keys), given.kind, pool.lookup, pool.null_block
        if self.kind not in ("full", "window", "chunk", "state"):
            raise ValueError(f"[longest_hit] kind is {self.kind!r}: give 'full', 'window', 'chunk' or 'state'")
        self.block_size = checked_int("longest_hit", "block_size", given.block_size)
        self.size = checked_int("longest_hit", "size", given.size)
        self.grain = checked_int("longest_hit", "grain", self.block_size if given.grain is None else given.grain)
        if self.block_size % self.grain:
            raise ValueError(f"[longest_hit] grain is {self.grain}, it must divide the block size {self.block_size}")
        self.per_block = self.block_size // self.grain
        self.num_tokens = len(self.keys) * self.grain
        self.ends = self.keys[self.per_block - 1 :: self.per_block]
        self.found = self.blocks_of(self.num_tokens)  # `longest` has found all blocks from this one on

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
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
        """Return the block that is filled up to here, in a list. The list is empty if the pool does not have it."""
        end = tokens // self.grain
        return self.lookup(self.keys[end - 1 : end])

    def fullest(self, block: int) -> tuple[int, list[int]]:
        """Return the fullest cached copy of a block, and the token up to which it is filled."""
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

    The call changes nothing. So `BlockPool.touch` the tables before any other call, which may evict their blocks.

    Parameters
    ----------
    pool : BlockPool
    groups : sequence of GroupKeys
        The keys of the same prompt in each group.
    align : int, optional
        The length of a hit is a multiple of this. By default the least common multiple of all block sizes.
    limit : int, optional
        Most tokens of a hit, for example one less than the prompt has. By default the tokens that all groups have
        keys for.

    Returns
    -------
    Hit
        Each table has ``ceil(tokens / block_size)`` entries.

    Raises
    ------
    ValueError, TypeError
        There is no group, a kind is unknown, a grain does not divide its block size, or an argument is no integer or
        out of range.

    Notes
    -----
    A prefix of c tokens is a hit if each group has what a query at position c reads:

    - "full": all tokens before c. "window": the tokens from c - size + 1 on. "chunk": the tokens from the last
      multiple of size on that is at most c. A block with such tokens needs a cached key that ends inside it, at the
      last of these tokens or behind it.
    - "state": the key that ends exactly at c, unless c is 0.

    With an `align` below the default, c may be inside a block. This last block is cached, and filled up to c or
    further: copy it, and write to the copy. If nobody reads it, it is a null block: take a new one.
    """
    if not groups:
        raise ValueError("[longest_hit] there are 0 groups, the least is 1")
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
        for group in sorted(prompt, key=lambda group: group.kind == "full"):  # full ones last: they look up most
            tokens = group.longest(tokens, align)
    return Hit(tokens, [group.table(tokens) for group in prompt])


def skip(pool: BlockPool, table: list[int], n: int) -> list[int]:
    """Give back the first `n` blocks of a table, which no later token reads. Null blocks replace them.

    Blocks without a key become blank. Blocks with a key can be found until they are taken, the last one first. O(n).

    Parameters
    ----------
    pool : BlockPool
    table : list of int
        Changed in place. Null blocks in it are ignored.
    n : int
        0 .. len(table).

    Returns
    -------
    list of int
        The blocks that were given back, in this order.

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
