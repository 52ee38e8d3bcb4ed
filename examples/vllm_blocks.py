"""vLLM's KV cache manager on kvpool's blocks: the manager is vLLM's own, its block pool is `adapters.block_pool`.

    python examples/vllm_blocks.py        # in an environment where `import vllm` works; tested with vLLM 0.33.0

vLLM itself is a framework for GPUs; its KV cache manager is plain Python and runs anywhere. The program makes two
managers, one as it comes and one on kvpool, gives both the same requests, compares every block table, and reports the
CPU time of both. It is for models whose layers all attend to everything (one group of full attention). What the
manager never asks of the pool there (partial blocks, moved hashes, pools beside the GPU's) is not written.
"""

import argparse
import random
import sys
import time

from kvpool.adapters.block_pool import BlockPool

BLOCK_SIZE = 16

try:
    import torch
    from vllm import SamplingParams
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
except ImportError as error:
    raise SystemExit(
        f"[vllm_blocks] vLLM is not here ({error}): nothing was run. Its wheel, or its source on PYTHONPATH with what "
        f"that imports, is enough; it needs no GPU"
    ) from None


class Block:
    """The entry of a table of vLLM's managers: an id, and questions that the pool answers."""

    __slots__ = ("block_id", "is_null", "pool")

    def __init__(self, pool, block_id):
        self.pool, self.block_id, self.is_null = pool, block_id, block_id == BlockPool.null_block

    @property
    def block_hash(self):
        return self.pool.blocks_of_keys.key(self.block_id)

    @property
    def ref_cnt(self):
        return self.pool.references[self.block_id]


class KVPoolBlocks:
    """The calls of vLLM's `BlockPool` that a manager of full attention makes."""

    def __init__(
        self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=False, metrics_collector=None,
        num_hash_lookahead_tokens=0, medium="GPU",
    ):  # fmt: skip
        self.num_gpu_blocks, self.enable_caching, self.hash_block_size = num_gpu_blocks, enable_caching, hash_block_size
        self.num_hash_lookahead_tokens, self.metrics_collector = num_hash_lookahead_tokens, metrics_collector
        self.enable_kv_cache_events, self.medium = enable_kv_cache_events, medium
        self.blocks_of_keys = pool = BlockPool(num_gpu_blocks, events=1 << 20 if enable_kv_cache_events else 0)
        self.blocks = [Block(self, block) for block in range(num_gpu_blocks)]
        self.references, self.null_block = pool.references, self.blocks[pool.null_block]
        self.get_num_free_blocks = lambda: pool.num_free
        self.get_usage = lambda: pool.usage
        self.reset_prefix_cache = pool.reset

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        keys = [kv_cache_utils.make_block_hash_with_group_id(block_hash, group) for group in kv_cache_group_ids]
        found = self.blocks_of_keys.lookup(keys)
        return [self.blocks[block] for block in found] if len(found) == len(keys) else None

    def cache_full_blocks(
        self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=None
    ):
        span = slice(num_cached_blocks, num_full_blocks)
        ids = [block.block_id for block in blocks[span]]
        if block_mask is not None:
            ids = [block if kept else BlockPool.null_block for block, kept in zip(ids, block_mask, strict=True)]
        hashes = kv_cache_utils.resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)[span]
        group = kv_cache_group_id.to_bytes(4, "big")
        self.blocks_of_keys.cache(ids, [block_hash + group for block_hash in hashes])

    def get_new_blocks(self, num_blocks):
        blocks = self.blocks
        return [blocks[block] for block in self.blocks_of_keys.get(num_blocks)]

    def touch(self, blocks):
        self.blocks_of_keys.touch([block.block_id for block in blocks], blank=True)

    def free_blocks(self, ordered_blocks):
        self.blocks_of_keys.free([block.block_id for block in ordered_blocks])

    def evict_blocks(self, block_ids):
        self.blocks_of_keys.evict(sorted(block_ids), keep_place=True)

    def is_block_writable(self, block):
        return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

    def take_events(self):
        """Removals and resets; vLLM's event for stored blocks also wants the tokens, which `cache_full_blocks` has."""
        told = []
        for what, *about in self.blocks_of_keys.drain_events():
            if what == "cleared":
                told.append(AllBlocksCleared())
            elif what == "removed":
                hashes = [kv_cache_utils.get_block_hash(key) for key in about[0]]
                told.append(BlockRemoved(block_hashes=hashes, medium=self.medium))
        return told


def manager(pool_type, num_blocks):
    """A manager of vLLM's, with a block pool of this type."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    own, kv_cache_coordinator.BlockPool = kv_cache_coordinator.BlockPool, pool_type
    try:
        return KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=1 << 20,
        )  # fmt: skip
    finally:
        kv_cache_coordinator.BlockPool = own


class Engine:
    """A manager and the requests it serves: prompts that share their beginnings, decode, the end."""

    def __init__(self, pool_type, num_blocks):
        self.manager, self.running, self.seconds, self.hits = manager(pool_type, num_blocks), {}, 0.0, 0

    def timed(self, call, *arguments):
        begin = time.thread_time()
        result = call(*arguments)
        self.seconds += time.thread_time() - begin
        return result

    def start(self, request):
        """Open a request; False: there is no room for it."""
        blocks, hit, _ = self.timed(self.manager.get_computed_blocks, request)
        if self.timed(self.manager.allocate_slots, request, request.num_tokens - hit, hit, blocks) is None:
            return False
        request.num_computed_tokens = request.num_tokens
        self.hits += hit
        self.running[request.request_id] = request
        return True

    def decode(self, name, token):
        request = self.running[name]
        request.append_output_token_ids(token)
        if self.timed(self.manager.allocate_slots, request, 1) is None:
            return False
        request.num_computed_tokens += 1
        return True

    def stop(self, name):
        self.timed(self.manager.free, self.running.pop(name))

    def table(self, name):
        return self.manager.get_block_ids(name)


def serve(num_requests, num_blocks, seed):
    """The same requests on both; what each took, and how many tables were compared."""
    rng = random.Random(seed)
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256)
    engines = [Engine(kv_cache_coordinator.BlockPool, num_blocks), Engine(KVPoolBlocks, num_blocks)]
    shared = [[rng.randrange(50_000) for _ in range(rng.randrange(500, 4_000))] for _ in range(12)]
    waiting, left, compared = [str(k) for k in range(num_requests)], {}, 0

    def both(call):
        one, other = (call(engine) for engine in engines)
        assert one == other, f"vLLM's manager differs on the two pools: {one} and {other}"
        return one

    while waiting or left:
        while waiting and len(left) < 48:
            prompt = rng.choice(shared) + [rng.randrange(50_000) for _ in range(rng.randrange(1, 400))]
            name = waiting[0]
            if not both(
                lambda engine, name=name, prompt=prompt: engine.start(
                    Request(name, prompt, SamplingParams(max_tokens=512), None, block_hasher=hasher)
                )
            ):
                break
            waiting.pop(0)
            left[name] = rng.randrange(8, 256)
        for name in list(left):
            token = rng.randrange(50_000)
            left[name] -= 1
            if left[name] == 0 or not both(lambda engine, name=name, token=token: engine.decode(name, token)):
                both(lambda engine, name=name: engine.table(name))
                both(lambda engine, name=name: engine.stop(name))
                compared += 1
                del left[name]
    both(lambda engine: (engine.hits, engine.manager.usage))
    return engines, compared


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    (stock, ours), compared = serve(asked.requests, asked.blocks, asked.seed)
    version = getattr(sys.modules["vllm"], "__version__", "of unknown version")
    print(f"vLLM {version}, its KVCacheManager on {asked.blocks} blocks of {BLOCK_SIZE} tokens")
    print(f"{compared} requests, {stock.hits} tokens found in the cache, every block table the same")
    print(f"calls of the manager: {stock.seconds:.2f} s with its own pool, {ours.seconds:.2f} s with kvpool's")


if __name__ == "__main__":
    main()
