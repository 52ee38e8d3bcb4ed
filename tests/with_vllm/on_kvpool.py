"""A pytest plugin (`-p on_kvpool`): every block pool that a suite of vLLM's makes is kvpool's."""

from types import SimpleNamespace

from vllm.v1.core import block_pool

from kvpool.adapters.vllm.blocks import FreeBlocks, KVPoolBlocks, take_place


def ends(free):
    """Head and tail of vLLM's free list, as its tests walk it: a copy of the core's order."""
    head, tail = vars(free).setdefault("ends", (SimpleNamespace(block_id=-1), SimpleNamespace(block_id=-1)))
    last = head
    for block in [*free.get_all_free_blocks(), tail]:
        block.prev_free_block, last.next_free_block, last = last, block, block
    return head, tail


take_place()
block_pool.BlockPool = KVPoolBlocks
FreeBlocks.fake_free_list_head = property(lambda free: ends(free)[0])
FreeBlocks.fake_free_list_tail = property(lambda free: ends(free)[1])
