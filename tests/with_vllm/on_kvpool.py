"""A pytest plugin (`-p on_kvpool`): every block pool that a suite of vLLM's makes is kvpool's."""

from vllm.v1.core import block_pool

from kvpool.adapters.vllm.blocks import KVPoolBlocks, take_place

take_place()
block_pool.BlockPool = KVPoolBlocks
