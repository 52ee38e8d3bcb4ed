"""One tiny random-weight model of every family that the adapter can attend for over the pool."""

import mlx.core as mx
from mlx_lm.models import gemma, gemma2, ministral3, mixtral, qwen2, qwen3, qwen3_moe
from mlx_models import SEED, WINDOW, tiny, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_sliding_llama

from benchmarks import tiny_families

HEAD_DIM = {"head_dim": 8}


def model_of_file(name, vocab_size=96, **fields):
    """The tiny model of any file of mlx-lm; `fields` are those of its config that differ."""
    mx.random.seed(SEED)
    model = tiny_families.build(name, tiny_families.config_of(name, vocab_size) | fields)
    tiny_families.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def family(module, **options):
    return lambda: tiny(module, **options)


def gemma2_with_small_embeddings():
    """Tied embeddings, as large as those of the others, would say the last token again and again."""
    model = family(gemma2, **HEAD_DIM, attn_logit_softcapping=2.0, query_pre_attn_scalar=2.0)()
    model.model.embed_tokens.weight *= 0.1
    return model


def gpt_oss_with_sinks():
    """Stock weights have sinks of 0 until a checkpoint is loaded."""
    model = tiny_gpt_oss()
    for layer in model.layers:
        layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    return model


FAMILIES = {
    "llama": tiny_llama,
    "llama, two masks": tiny_sliding_llama,
    "qwen2": family(qwen2),
    "qwen3": family(qwen3, **HEAD_DIM, max_position_embeddings=512, rope_theta=1e4, tie_word_embeddings=False),
    "qwen3_moe": family(
        qwen3_moe,
        **HEAD_DIM,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=32,
        rope_theta=1e4,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        norm_topk_prob=True,
    ),
    "ministral3": family(
        ministral3,
        **HEAD_DIM,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "default",
            "type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    ),
    "mixtral": family(mixtral, num_local_experts=4),
    "gemma": family(gemma, **HEAD_DIM),
    "gemma2": gemma2_with_small_embeddings,
    "gemma3_text": tiny_gemma3,
    "gpt_oss": gpt_oss_with_sinks,
}
