"""What layers with a sliding window cost on a pool, which keeps every token: ``python -m benchmarks.windows``.

Bytes of mlx-lm's own caches, which keep the window, beside the blocks of a pool, after one prompt and the same tokens.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.adapters.mlx_lm.tiny import randomize

BLOCK, CHUNK, NEW = 16, 512, 8
SIZES = {
    **{"hidden_size": 48, "num_hidden_layers": 12, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131, "rms_norm_eps": 1e-5},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 512, "sliding_window_pattern": 6},
    "gpt_oss": {
        **{"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
}
"""Windows and the order of layers as published, everything else small."""


def measure(name: str, num_tokens: int) -> tuple[int, int]:
    """Return the bytes of mlx-lm's own caches, and of the blocks that were in use."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(SIZES | MODELS[name] | {"model_type": name}))
    randomize(model)
    prompt = [7 * n % 131 for n in range(num_tokens)]
    cache = make_prompt_cache(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=NEW, prompt_cache=cache, prefill_step_size=CHUNK)
    expected = [int(token) for token, _ in steps]
    blocks = -(-(num_tokens + NEW) // BLOCK) + 8
    with Engine(model, blocks, block_size=BLOCK, max_running=1, prefill_chunk=CHUNK, max_step_tokens=CHUNK) as engine:
        found = engine.batch([prompt], max_tokens=NEW, eos=())[0].tokens.tolist()
        used = engine.kv.pool.stats().peak_used * engine.kv.backend.spec.block_nbytes
    assert found == expected, f"{name}: other tokens"
    return sum(layer.nbytes for layer in cache), used


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default: %(default)s)")
    num_tokens = parser.parse_args(argv).tokens
    for name in MODELS:
        stock, used = measure(name, num_tokens)
        print(f"{name:12} mlx-lm {stock / 1e6:6.2f} MB, pool {used / 1e6:6.2f} MB, {used / stock:.2f} times")


if __name__ == "__main__":
    main()
