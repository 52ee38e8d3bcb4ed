"""mlx-lm on a kvpool pool: the stock engines, unmodified, with a paged KV cache.

    from kvpool.adapters.mlx_lm import install

    with install(model, num_blocks=4096) as kv:  # model.make_cache now hands out paged caches
        generator = BatchGenerator(model)        # mlx-lm's own; generate_step and LRUPromptCache work too
        ...
    print(kv.summary())

With ``install(model, num_blocks=4096, prefix_cache=True)`` prompts that begin alike share blocks: `PagedPromptCache`
is mlx-lm's `LRUPromptCache` on them, `PagedKV.fetch` and `PagedKV.commit` are the two calls behind it.

Every layer of the model shares one `kvpool.Pool`: a prompt of 100 tokens takes 7 blocks of 16 tokens, once,
not once per layer. ``copy.deepcopy`` of a cache (mlx-lm's prompt cache does it on every hit) is a fork that
copies no KV, dropping a cache returns its blocks.

Modules: `host` (pool and storage of one model), `hook` (how engines get there), `batch` (sequences that run
together, the operation log), `cache` (what a layer of the model sees), `prefix` (mlx-lm's prompt cache on
shared blocks).
"""

from kvpool.adapters.mlx_lm.batch import EngineStopped
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.host import SUPPORTED_VERSIONS, PagedKV, Summary, install
from kvpool.adapters.mlx_lm.prefix import PagedPromptCache

__all__ = ["SUPPORTED_VERSIONS", "EngineStopped", "PagedKV", "PagedKVCache", "PagedPromptCache", "Summary", "install"]
