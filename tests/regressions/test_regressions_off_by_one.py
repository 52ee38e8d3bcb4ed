"""Family E: one too many, one too few. See README.md."""

from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec


def test_e12_storage_has_as_many_blocks_as_its_pool():
    """The same, where one object owns both."""
    manager = KVBlockManager(KVSpec(1, 1, 8, "float32", 4), num_blocks=8)
    assert manager.backend.num_blocks == manager.pool.stats().num_blocks
