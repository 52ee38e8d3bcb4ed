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

`Engine` runs models without an engine of mlx-lm, by `kvpool.Scheduler`: prompts in chunks, preemption, samples that
share their prompt, beams, all in one forward pass per step.

Models of the Llama, Qwen, Mistral, Gemma and gpt-oss families attend straight over the blocks, by the kernels of Metal
or of the CPU; others, and all models where there are no kernels, gather each context for MLX's own attention.
``kv.route`` says which.

With ``install(model, num_blocks=4096, eviction=H2O(max_kv=1024))`` no sequence holds more than so many tokens, whatever
its length; ``kv.make_cache(policy)``, or `make_cache`, does that for one cache, ``Engine(model, 4096,
eviction=...)`` for an engine. See docs/eviction.md.

Two options of mlx-lm's engines do not go with paged caches. ``max_kv_size``, on a model that has no ``make_cache`` of
its own, is a ValueError when the caches are made (other models ignore it, here as there). ``kv_bits`` is a ValueError
when mlx-lm wants to quantize, unless the blocks have these bits and groups from `install`. That is not before a cache
has ``quantized_kv_start`` tokens, 5000 by default. mlx-lm's server closes the connection of such a request: give the
bits to `install`, and to the server the same or none.

`install` computes nothing of the model. With the kernels of the CPU a forward pass computes while it is called, so it
loads the weights of a model that was loaded with ``lazy=True``, even if nobody evaluates its result. Elsewhere it only
builds the graph, as with mlx-lm's own caches.

Who deletes or replaces ``model.make_cache`` inside the block gets mlx-lm's own caches. Then ``kv.route`` begins with
"lost: ", and the end of the block is a RuntimeError. `kvpool serve` takes no request any more then.
"""

from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.engine import Completion, Engine, TokenEvent
from kvpool.adapters.mlx_lm.eviction import make_cache
from kvpool.adapters.mlx_lm.host import SUPPORTED_VERSIONS, PagedKV, Summary, install
from kvpool.adapters.mlx_lm.passes import EngineStopped
from kvpool.adapters.mlx_lm.prefix import PagedPromptCache
from kvpool.adapters.mlx_lm.sampling import Sampling

__all__ = [
    "SUPPORTED_VERSIONS",
    "Completion",
    "Engine",
    "EngineStopped",
    "PagedKV",
    "PagedKVCache",
    "PagedPromptCache",
    "Sampling",
    "Summary",
    "TokenEvent",
    "install",
    "make_cache",
]
