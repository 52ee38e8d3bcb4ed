"""mlx-lm on a kvpool pool: the stock engines, unmodified, with a paged KV cache.

    from kvpool.adapters.mlx_lm import install

    with install(model, num_blocks=4096) as kv:  # model.make_cache now hands out paged caches
        generator = BatchGenerator(model)        # mlx-lm's own; generate_step and LRUPromptCache work too
        ...
    print(kv.summary())

With ``install(model, num_blocks=4096, prefix_cache=True)`` prompts with a common beginning share its blocks.
`PagedPromptCache` has the interface of mlx-lm's `LRUPromptCache`. `PagedKV.fetch` and `PagedKV.commit` are the two
calls behind it.

All layers of the model share one `kvpool.Pool`. A prompt of 100 tokens takes 7 blocks of 16 tokens, not 7 per layer.
``copy.deepcopy`` of a cache, which mlx-lm's prompt cache does on every hit, is a fork that copies no KV. Dropping a
cache returns its blocks.

`Engine` runs models with `kvpool.Scheduler` in place of an engine of mlx-lm: prompts in chunks, preemption, samples
that share their prompt, beams, all in one forward pass per step.

Models attend straight over the blocks, with the kernels of Metal or of the CPU. Models that compute with their cached
keys or values on the way to attention, and all models without kernels, gather each context for MLX's own attention.
``kv.route`` says which.

With ``install(model, num_blocks=4096, eviction=H2O(max_kv=1024))`` no sequence holds more than 1024 tokens.
``kv.make_cache(policy)`` or `make_cache` sets a policy for one cache, ``Engine(model, 4096, eviction=...)`` for an
engine. See docs/eviction.md.

Paged caches do not support two options of mlx-lm's engines:

- ``max_kv_size`` raises ValueError when the caches are made, on a model without a ``make_cache`` of its own. Other
  models ignore it, as in mlx-lm.
- ``kv_bits`` raises ValueError when mlx-lm starts to quantize, unless `install` has set the same bits and groups.
  mlx-lm starts when a cache has ``quantized_kv_start`` tokens, 5000 by default. Its server answers such a request with
  status 500, or an error event in a stream. Give the bits to `install`, and the same bits or none to the server.

`install` runs 14 tokens through a model to see whether it can attend over the blocks: four short forward passes, which
load the weights of a model that was loaded with ``lazy=True``. With ``fused=False`` or without kernels it computes
nothing. With the CPU kernels a forward pass computes while it is called, even if its result is never evaluated. On
other routes it only builds the graph, as with mlx-lm's own caches.

If ``model.make_cache`` is deleted or replaced inside the block, mlx-lm makes its own caches. Then ``kv.route`` begins
with "lost: ", and the end of the block raises RuntimeError.
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
