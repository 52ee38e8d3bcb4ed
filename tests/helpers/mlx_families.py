"""One tiny random-weight model of every family that the adapter can attend for over the pool."""

from functools import partial

import mlx.core as mx
from mlx_lm.models import gemma2
from mlx_models import SEED, VOCAB, WINDOW, tiny, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_sliding_llama

from benchmarks import tiny_families


def model_of_file(name, vocab_size=96, **fields):
    """The tiny model of any file of mlx-lm; `fields` are those of its config that differ."""
    mx.random.seed(SEED)
    model = tiny_families.build(name, tiny_families.config_of(name, vocab_size) | fields)
    tiny_families.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def gemma2_with_small_embeddings():
    """Tied embeddings, as large as those of the others, would say the last token again and again."""
    model = tiny(gemma2, head_dim=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=2.0)
    model.model.embed_tokens.weight *= 0.1
    return model


def gpt_oss_with_sinks():
    """Stock weights have sinks of 0 until a checkpoint is loaded."""
    model = tiny_gpt_oss()
    for layer in model.layers:
        layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    return model


SCALED = tiny_families.ROPE_LLAMA4["rope_parameters"] | {"original_max_position_embeddings": 16}
FAMILIES = {
    "llama": tiny_llama,
    "llama, two masks": tiny_sliding_llama,
    **{name: partial(model_of_file, name, VOCAB) for name in ("qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma")},
    "ministral3": partial(model_of_file, "ministral3", VOCAB, sliding_window=WINDOW, rope_parameters=SCALED),
    "gemma2": gemma2_with_small_embeddings,
    "gemma3_text": tiny_gemma3,
    "gpt_oss": gpt_oss_with_sinks,
}
