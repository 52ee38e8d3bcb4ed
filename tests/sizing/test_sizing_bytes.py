"""What `layer_groups` computes from a config, against the bytes that mlx-lm's caches of that model hold."""

import copy
from dataclasses import replace

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from held_bytes import KINDS, computed, measured
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache
from mlx_lm.utils import MODEL_REMAPPING
from tiny_files import build, gather_mm

from benchmarks.tiny_families import NOT_RUN, OWN, config_of
from kvpool.model_config import layer_groups
from kvpool.sizing import LayerGroup
from kvpool.sizing_families import FAMILIES

REFUSED = "deepseek_v41"  # one latent stands for several tokens


def difference(name, lengths, change=lambda groups: groups, compute=False, config=None):
    """(length, computed, measured) at the first length where they differ, None if there is none."""
    config = config or config_of(name)
    groups = change(layer_groups(config))
    model = build(name, copy.deepcopy(config))
    for num_tokens in lengths:
        ours, theirs = computed(groups, num_tokens), measured(model, num_tokens, compute)
        if ours != theirs:
            return num_tokens, ours, theirs
    return None


COMPUTED = (
    *("llama", "gemma3", "gemma4_text", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "jamba", "kimi_linear"),
    *("nemotron_h", "longcat_flash_ngram", "mamba2"),
)


@pytest.mark.parametrize("name", sorted(OWN.keys() - {REFUSED}))
def test_computed_bytes_are_those_that_mlx_lm_holds(name):
    assert difference(name, (2, 23, 70, 300)) is None


@pytest.mark.long
@pytest.mark.parametrize("name", COMPUTED)
def test_bytes_are_the_same_when_values_are_computed(name, monkeypatch):
    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    assert difference(name, (70,), compute=True) is None


def flattened(name):
    """The config of a wrapped text model with its fields beside the model_type."""
    return config_of(name)["text_config"] | {"model_type": name}


def inside(name, wrapper):
    """The config of a file, as the text model of another one."""
    return {"model_type": wrapper, "vocab_size": 96, "text_config": config_of(name)}


WORDS = ["mamba", "attention", "mlp", "moe", "linear_attention", "full_attention"]
SPARSE = {"sparse_attention_config": None, "layer_types": None, "sparse_attention_freq": [0, 1, 1, 0]}
INDEX = {"index_n_heads": 2, "index_head_dim": 20, "index_block_size": 16, "index_topk_blocks": 2}
LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
OTHERWISE = [  # forms of a config that read otherwise than the first: file, config
    ("nemotron_h", config_of("nemotron_h") | {"hybrid_override_pattern": "MM*-E*"}),
    ("nemotron_h", config_of("nemotron_h") | {"hybrid_override_pattern": None, "layers_block_type": WORDS}),
    ("nemotron_h", config_of("nemotron_h") | {"hybrid_override_pattern": None, "layer_types": WORDS}),
    ("nemotron_h", config_of("nemotron_h") | {"head_dim": None}),
    ("jamba", config_of("jamba") | {"layers_block_type": ["attention", "mamba", "mamba", "attention"]}),
    ("lfm2", config_of("lfm2") | {"full_attn_idxs": [0, 3], "layer_types": None}),
    ("lfm2_moe", config_of("lfm2_moe") | {"full_attn_idxs": [2], "layer_types": None}),
    ("minimax_m3_vl", {"model_type": "minimax_m3_vl", "text_config": flattened("minimax_m3_vl") | SPARSE | INDEX}),
    ("plamo2", config_of("plamo2") | {"mamba_enabled": False}),
    ("qwen3_next", config_of("qwen3_next") | {"layer_types": LINEAR}),
    ("plamo3", config_of("plamo3") | {"sliding_window": None, "window_size": 12}),
    ("bailing_moe_v3", config_of("bailing_moe_v3") | {"num_hidden_layers": 6}),
    ("bailing_hybrid", config_of("bailing_hybrid") | {"num_hidden_layers": 5, "head_dim": None}),
    ("bailing_moe_linear", config_of("bailing_moe_linear") | {"num_hidden_layers": 7}),
    ("gemma3_text", config_of("gemma3_text") | {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 7}),
    ("gemma4_text", config_of("gemma4_text") | {"num_kv_shared_layers": 0, "attention_k_eq_v": False}),
    ("gemma4_text", config_of("gemma4_text") | {"layer_types": None, "sliding_window_pattern": 2}),
    ("gemma4_text", config_of("gemma4_text") | {"global_head_dim": None, "num_global_key_value_heads": None}),
    ("gpt_bigcode", config_of("gpt_bigcode") | {"multi_query": False}),
    ("gpt_neox", config_of("gpt_neox") | {"num_key_value_heads": 2}),
    ("llama", config_of("llama") | {"layer_types": None}),
    ("llama", config_of("llama") | {"layer_types": None, "head_dim": None, "num_key_value_heads": None}),
    ("llama", config_of("llama") | {"model_type": "mistral", "layer_types": None}),
    ("llama4", {"model_type": "llama4", "text_config": flattened("llama4") | {"num_hidden_layers": 9}}),
    ("mimo_v2_flash", config_of("mimo_v2_flash") | {"num_hidden_layers": 2}),
    ("step3p5", config_of("step3p5") | {"attention_other_setting": None, "layer_types": []}),
    ("smollm3", config_of("smollm3") | {"layer_types": ["full_attention"] * 4, "sliding_window": 24}),
    ("qwen2", config_of("qwen2") | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    ("hunyuan", config_of("hunyuan") | {"use_cla": False}),
    ("deepseek_v3", config_of("deepseek_v3") | {"model_type": "kimi_k2"}),
    ("minimax", config_of("minimax") | {"model_type": "minimax_m2", "head_dim": None}),
    ("mistral3", inside("mistral4", "mistral3")),
    ("mistral3", inside("llama", "mistral3")),
    ("mistral3", inside("ministral3", "llava")),
    ("qwen3_5", flattened("qwen3_5")),
    ("qwen2_vl", flattened("qwen2_vl")),
    ("qwen3_vl", flattened("qwen3_vl")),
    ("kimi_k3", flattened("kimi_k3")),
    ("muse_glimmer", inside("muse_glimmer", "muse_glimmer")),
]


@pytest.mark.parametrize(("name", "config"), OTHERWISE, ids=[f"{n}-{name}" for n, (name, _) in enumerate(OTHERWISE)])
def test_computed_bytes_of_other_forms_are_those_that_mlx_lm_holds(name, config):
    assert difference(name, (2, 70, 300), config=config) is None


def changed(kind, /, **fields):
    """The groups with one field of a kind changed."""
    return lambda groups: tuple(replace(g, **fields) if g.kind == kind else g for g in groups)


def with_wrong_dtype(groups):
    """All arrays of states in the dtype of the model."""
    return tuple(replace(g, arrays=tuple(replace(a, dtype=g.dtype) for a in g.arrays)) for g in groups)


FAULTS = {
    "a state in the dtype of the model": ("mamba2", with_wrong_dtype),
    "a chunk that is a window": ("llama4", changed("chunk", kind="window")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    name, change = FAULTS[fault]
    assert difference(name, (70,), change) is not None


@pytest.mark.parametrize("make", [RotatingKVCache, ChunkedKVCache])
@pytest.mark.parametrize("size", [1, 2, 24, 256, 300, 2048, 3000])
def test_rows_of_a_cache_follow_from_the_length_alone(make, size):
    group = LayerGroup(KINDS[make], (0,), "float16", size=size, num_kv_heads=1, head_dim=1, v_head_dim=1)
    for num_tokens in (1, 2, 24, 25, 255, 256, 257, 300, 302, 2048, 2049, 2050, 2051, 3001, 4097, 4098, 6200):
        if make is RotatingKVCache and size == 1 and num_tokens > 1:
            continue
        cache, held = make(size), 0
        while held < num_tokens:
            new = min(2048, num_tokens - 1 - held) or 1
            if make is ChunkedKVCache:
                cache.maybe_trim_front()
            cache.update_and_fetch(*[mx.zeros((1, 1, new, 1), mx.float16)] * 2)
            held += new
        assert group.num_held_by_mlx_lm(num_tokens) == cache.keys.shape[2], num_tokens


def test_every_model_type_of_mlx_lm_is_read_or_refused_by_name():
    import pkgutil

    import mlx_lm.models

    files = {info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__)}
    known = {MODEL_REMAPPING.get(name, name) for name in FAMILIES} | {"Klear"}
    assert known - {"klear"} <= files
    assert (set(OWN) | set(NOT_RUN)) == known - {"klear"}
    assert set(MODEL_REMAPPING) - {"deepseek_v41_text"} <= set(FAMILIES)
