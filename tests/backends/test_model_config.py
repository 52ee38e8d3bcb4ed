"""What a model's config says of its KV cache: published configs sized by hand, and everything else refused."""

import json

import pytest

from kvpool.config import KVSpec, describe_plan
from kvpool.model_config import spec_from_config

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}


def sizes(model_type, layers, heads, kv_heads, hidden, **others):
    """The fields that decide, under the names that most configs give them."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    fields = dict(zip(names, (layers, heads, kv_heads, hidden), strict=True))
    return {"model_type": model_type, "torch_dtype": "bfloat16"} | fields | others


def gemma3(**text):
    """The published form: one dtype at the top for all parts, fields of the text model left to the class."""
    text = {"model_type": "gemma3_text", "sliding_window": 1024} | text
    return {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"patch_size": 14}}


ALTERNATING = ["sliding_attention", "full_attention"] * 12
SIZED = {  # as published: what one token takes, by hand
    "Llama-3.1-8B": (LLAMA_8B, 2 * 32 * 8 * 128 * 2),
    "Mistral-7B": (sizes("mistral", 32, 32, 8, 4096, sliding_window=None), 2 * 32 * 8 * 128 * 2),
    "Qwen2-7B": (
        sizes("qwen2", 28, 28, 4, 3584, sliding_window=131072, use_sliding_window=False),
        2 * 28 * 4 * 128 * 2,
    ),
    "Qwen3-30B-A3B": (sizes("qwen3_moe", 48, 32, 4, 2048, head_dim=128), 2 * 48 * 4 * 128 * 2),
    "gpt-oss-20b": (
        sizes("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=ALTERNATING),
        2 * 24 * 8 * 64 * 2,
    ),
    "Gemma-3-4B": (gemma3(hidden_size=2560, num_hidden_layers=34), 2 * 34 * 4 * 256 * 2),
    "Gemma-3-12B": (
        gemma3(hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8),
        2 * 48 * 8 * 256 * 2,  # 3840 / 16 is 240, which is not its head_dim
    ),
    "Gemma-3-27B": (
        gemma3(hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        2 * 62 * 16 * 128 * 2,
    ),
    "DeepSeek-V3": (
        sizes("deepseek_v3", 61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128),
        61 * (512 + 64) * 2,
    ),
    "MiniMax-M2": (
        sizes("minimax_m2", 62, 48, 8, 3072, head_dim=128, attn_type_list=[1] * 62),
        2 * 62 * 8 * 128 * 2,
    ),
}

HYBRIDS = {  # as published; the field that has to be named
    "Qwen3-Next-80B": (
        sizes("qwen3_next", 48, 16, 2, 2048, head_dim=256, full_attention_interval=4, linear_num_value_heads=32),
        "full_attention_interval is 4",
    ),
    "Qwen3.5": (
        {"torch_dtype": "bfloat16", "text_config": sizes("qwen3_5", 32, 16, 4, 2560, linear_num_value_heads=32)},
        "linear_num_value_heads is 32",
    ),
    "Nemotron-H-8B": (
        sizes("nemotron_h", 52, 32, 8, 4096, hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"),
        "hybrid_override_pattern is 'M-M-",
    ),
    "Jamba": (sizes("jamba", 32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4), "attn_layer_offset is 4"),
    "Falcon-H1-7B": (sizes("falcon_h1", 44, 12, 2, 3072, head_dim=128, mamba_d_ssm=3072), "mamba_d_ssm is 3072"),
    "Granite-4-H": (
        sizes("granitemoehybrid", 4, 12, 4, 1536, layer_types=["mamba", "mamba", "attention", "mamba"]),
        r"layer_types names \['mamba'\]",
    ),
    "LFM2": (sizes("lfm2", 16, 32, 8, 2048, full_attn_idxs=[2, 5, 8], conv_L_cache=3), "conv_L_cache is 3"),
    "Kimi-Linear": (
        sizes("kimi_linear", 27, 32, 32, 2304, kv_lora_rank=512, linear_attn_config={"kda_layers": [1, 2, 3]}),
        "linear_attn_config is ",
    ),
    "MiniMax-Text-01": (
        sizes("minimax_text_01", 80, 64, 8, 6144, head_dim=128, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10),
        "attn_type_list is ",
    ),
    "RecurrentGemma": (
        sizes("recurrent_gemma", 26, 10, 1, 2560, block_types=["recurrent", "recurrent", "attention"]),
        "block_types is ",
    ),
    "Gemma-3n": (
        {"text_config": sizes("gemma3n_text", 35, 8, 2, 2048, head_dim=256, num_kv_shared_layers=15)},
        "num_kv_shared_layers is 15",
    ),
    "Gemma-4": (sizes("gemma4_text", 30, 8, 4, 2560, head_dim=256, global_head_dim=512), "global_head_dim is 512"),
    "DeepSeek-V3.2": (
        sizes("deepseek_v32", 61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, index_topk=2048),
        "index_topk is 2048",
    ),
    "DeepSeek-V2": (
        sizes("deepseek_v2", 60, 128, 128, 5120, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128),
        r"latent attention \(kv_lora_rank 512\) of model_type 'deepseek_v2'",
    ),
    "PLaMo": (sizes("plamo", 40, 40, None, 5120, n_shared_head=8), "model_type 'plamo' is not known"),
    "something new": (sizes("llama9", 32, 32, 8, 4096), "model_type 'llama9' is not known"),
}


@pytest.mark.parametrize("name", SIZED)
def test_plan_of_a_published_config_counts_what_a_token_takes(name):
    config, token_nbytes = SIZED[name]
    assert describe_plan(config, "64GiB")[0]["token_nbytes"] == token_nbytes


@pytest.mark.parametrize("name", HYBRIDS)
def test_plan_of_a_model_whose_layers_differ_is_refused_by_the_field_that_shows_it(name):
    config, message = HYBRIDS[name]
    said = rf"^\[config\] {message}.*kvpool\.KVSpec.*kvpool\.config\.blocks_for$"
    with pytest.raises(ValueError, match=said) as caught:
        describe_plan(config, "64GiB")
    assert len(str(caught.value)) < 330


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (SIZED["Gemma-3-12B"][0], 1024),
        (SIZED["gpt-oss-20b"][0], 128),
        (LLAMA_8B | {"sliding_window": 4096}, 4096),
        (LLAMA_8B | {"sliding_window": 8192}, None),  # as long as the longest context
        (LLAMA_8B | {"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, None),
        (SIZED["Qwen2-7B"][0], None),
        (SIZED["Mistral-7B"][0], None),
        (LLAMA_8B, None),
    ],
)
def test_plan_says_that_layers_with_a_window_keep_every_token(config, window):
    facts, text = describe_plan(config, "16GiB")
    assert facts["sliding_window"] == window
    assert (f"layers with a sliding window of {window} tokens keep every token" in text) == (window is not None)


def test_plan_of_a_sparse_config_takes_the_longest_context_of_the_class():
    assert describe_plan(SIZED["Gemma-3-4B"][0], "64GiB")[0]["max_len"] == 131072


def test_spec_from_config_derives_head_dim():
    assert spec_from_config(LLAMA_8B) == KVSpec(32, 8, 128, "bfloat16", 16)


def test_spec_from_config_prefers_what_is_given():
    fields = LLAMA_8B | {"head_dim": 96, "dtype": "torch.float16"}
    assert spec_from_config(fields, block_size=32) == KVSpec(32, 8, 96, "float16", 32)
    assert spec_from_config(fields, dtype="float32").dtype == "float32"


def test_spec_from_config_of_latents_has_one_head_of_two_widths():
    assert spec_from_config(SIZED["DeepSeek-V3"][0]) == KVSpec(61, 1, 512, "bfloat16", 16, v_head_dim=64)


def test_spec_from_config_without_kv_heads_is_multi_head_where_the_model_is():
    assert spec_from_config(LLAMA_8B | {"num_key_value_heads": None}).num_kv_heads == 32
    with pytest.raises(ValueError, match=r"^\[config\] num_key_value_heads is missing"):
        spec_from_config(LLAMA_8B | {"model_type": "qwen2", "num_key_value_heads": None})


def test_spec_from_config_without_a_head_dim_that_the_type_gives_is_refused():
    with pytest.raises(ValueError, match=r"^\[config\] head_dim is missing"):
        spec_from_config(LLAMA_8B | {"model_type": "qwen3"})


def test_spec_from_config_needs_no_query_heads_when_head_dim_is_given():
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    assert spec_from_config(fields, dtype="float16") == KVSpec(2, 4, 64, "float16")


def test_spec_from_config_reads_files_folders_and_text_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_8B, "vision_config": {}}))
    assert spec_from_config(tmp_path) == spec_from_config(str(tmp_path / "config.json")) == spec_from_config(LLAMA_8B)


def test_spec_from_config_takes_the_dtype_of_the_text_model_before_that_of_all_parts():
    both = {"dtype": "float32", "text_config": LLAMA_8B}
    assert spec_from_config(both).dtype == "bfloat16"
    inner = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}
    assert spec_from_config(both | {"text_config": inner}).dtype == "float32"


@pytest.mark.parametrize(
    "missing", ["model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "torch_dtype"]
)
def test_spec_from_config_names_what_is_missing(missing):
    fields = {name: value for name, value in LLAMA_8B.items() if name != missing}
    with pytest.raises(ValueError, match=rf"\[config\] .*{missing}"):
        spec_from_config(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 4097}, "not a multiple"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": 5}, r"^\[config\] layer_types must be a list of strings, got 5$"),
        ({"layer_types": "full_attention"}, r"^\[config\] layer_types must be a list of strings, got 'full"),
        ({"layer_types": [["full_attention"]]}, r"^\[config\] layer_types must be a list of strings, got \[\["),
        ({"layer_types": [0] * 10_000}, r"^\[config\] layer_types must be .{0,110}\.\.\.$"),
        ({"model_type": 5}, r"^\[config\] model_type 5 is not known"),
        ({"model_type": "x" * 10_000}, r"^\[config\] model_type .{0,260}$"),
        ({"attn_type_list": 5}, "attn_type_list is 5"),
        ({"sliding_window": "wide"}, "sliding_window must be an int"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_plan_refuses_what_would_be_sized_wrongly(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        describe_plan(LLAMA_8B | fields, "16GiB")


def test_spec_from_config_of_a_bad_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        spec_from_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: 'utf-8'"):
        spec_from_config(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": ' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is nested too deeply"):
        spec_from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds list"):
        spec_from_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        spec_from_config(tmp_path / "nowhere.json")
