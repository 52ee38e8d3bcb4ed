"""KV blocks that outlive the pool: in host memory, on disk, on a server. docs/store.md is the page.

`BlockStore` is the protocol. `Layout` says what its records hold; `Layout.blocks` names the blocks of a prompt.
"""

from kvpool.store.blocks import BlockLayout, Blocks, BlockStore, Layout, TierStats, leading, prefix_keys
from kvpool.store.disk import DiskStore
from kvpool.store.server import ServerStore
from kvpool.store.tiers import MemoryStore, TieredStore

__all__ = [
    "BlockLayout",
    "BlockStore",
    "Blocks",
    "DiskStore",
    "Layout",
    "MemoryStore",
    "ServerStore",
    "TierStats",
    "TieredStore",
    "leading",
    "prefix_keys",
]
