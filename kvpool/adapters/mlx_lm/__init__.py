"""mlx-lm on a kvpool pool: the stock engines, unmodified, with a paged KV cache.

    from kvpool.adapters.mlx_lm import install

    with install(model, num_blocks=4096) as kv:  # model.make_cache now hands out paged caches
        generator = BatchGenerator(model)        # mlx-lm's own; generate_step and LRUPromptCache work too
        ...
    print(kv.summary())

`Engine` runs models with `kvpool.Scheduler` in place of an engine of mlx-lm. `PagedPromptCache` has the interface of
mlx-lm's `LRUPromptCache`. See docs/mlx-lm.md, and docs/eviction.md for what `make_cache` takes.

Paged caches do not support two options of mlx-lm's engines:

- ``max_kv_size`` raises ValueError when the caches are made, on a model without a ``make_cache`` of its own. Other
  models ignore it, as in mlx-lm.
- ``kv_bits`` raises ValueError when mlx-lm starts to quantize, unless `install` has set the same bits and groups.
  mlx-lm starts when a cache has ``quantized_kv_start`` tokens, 5000 by default.

`install` runs 14 tokens through a model to see whether it can attend over the blocks, which loads the weights of a
model that was loaded with ``lazy=True``. With ``fused=False`` or without kernels it computes nothing. With the CPU
kernels a forward pass computes while it is called, even if its result is never evaluated.
"""

from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.drafts import DraftModel, PromptLookup
from kvpool.adapters.mlx_lm.engine import Completion, Engine, TokenEvent
from kvpool.adapters.mlx_lm.eviction import make_cache
from kvpool.adapters.mlx_lm.host import PagedKV, Summary, install
from kvpool.adapters.mlx_lm.passes import EngineStopped
from kvpool.adapters.mlx_lm.prefix import PagedPromptCache
from kvpool.adapters.mlx_lm.sampling import LogitsNotFinite, Sampling

__all__ = [
    "Completion",
    "DraftModel",
    "Engine",
    "EngineStopped",
    "LogitsNotFinite",
    "PagedKV",
    "PagedKVCache",
    "PagedPromptCache",
    "PromptLookup",
    "Sampling",
    "Summary",
    "TokenEvent",
    "install",
    "make_cache",
]
