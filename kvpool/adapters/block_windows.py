"""Tables of layers that read a window, on a `BlockPool` that all layer groups share.

An engine whose layers differ has a table and keys of its own for each group, for example ``(content, group)``, on one
pool of equal pages. A hit of all groups is found by asking each for the keys that the others left, until none leaves
fewer. Null blocks stand for what nobody reads; `BlockPool.touch`, `free` and `cache` pass them over.

    table = find(pool, keys, window=64)         # null blocks, then the last 64 that are cached
    pool.touch(table)
    skip(pool, table, n)                        # the window has passed the first n blocks
"""

from collections.abc import Hashable, Sequence
from operator import index

from kvpool.adapters.block_pool import BlockPool


def find(pool: BlockPool, keys: Sequence[Hashable], window: int) -> list[int]:
    """Blocks of the longest prefix of `keys` whose last `window` blocks are cached, or that is cached as a whole.

    Nothing changes, so `touch` them before any other call. O(keys).

    Parameters
    ----------
    pool : BlockPool
    keys : keys of a prompt's full blocks, in order
    window : int
        Blocks that the layers read behind the end of the prefix, >= 0.

    Returns
    -------
    list of int
        As long as the prefix. Null blocks stand for those before the window.

    Raises
    ------
    ValueError
        `window` is negative.
    """
    window = index(window)
    if window < 0:
        raise ValueError(f"[find] window is {window}, the least is 0")
    end = at = len(keys)
    ids: list[int] = []  # of keys at .. end - 1, backwards
    while at and len(ids) < window:
        at -= 1
        found = pool.lookup(keys[at : at + 1])
        if found:
            ids += found
        else:
            end, ids = at, []
    return [pool.null_block] * (end - len(ids)) + ids[::-1]


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
