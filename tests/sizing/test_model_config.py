"""What a model's config says of its KV cache: published configs sized by hand, and what is not understood refused."""

import json
import sys

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from configs import LLAMA_8B

from benchmarks.tiny_families import OWN, config_of
from kvpool.adapters.mlx_lm import shapes as model_sizes
from kvpool.adapters.mlx_lm.shapes import ModelShape, groups_of_model
from kvpool.config import KVSpec, describe_plan
from kvpool.sizing import _RULES, LayerGroup, StateArray, layer_groups, spec_from_config

SLIDING, FULL = "sliding_attention", "full_attention"


def sizes(model_type, layers, heads, kv_heads, hidden, **others):
    """The fields that decide, under the names that most configs give them."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    fields = dict(zip(names, (layers, heads, kv_heads, hidden), strict=True))
    return {"model_type": model_type, "torch_dtype": "bfloat16"} | fields | others


def wrapped(model_type, text):
    """The published form of many: one dtype at the top for all parts, the text model inside."""
    text = {name: value for name, value in text.items() if name != "torch_dtype"}
    return {
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"patch_size": 14},
    }


def completed(config):
    """A config with the fields that mlx-lm needs and that do not decide, those of a tiny model."""
    tiny = config_of(config["model_type"])
    inner = {"text_config": tiny["text_config"] | config["text_config"]} if "text_config" in config else {}
    return tiny | config | inner


def gemma3(**text):
    """With fields of the text model left to the class."""
    return wrapped("gemma3", {"model_type": "gemma3_text", "sliding_window": 1024} | text)


DELTA = {
    **{"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
}
QWEN3_NEXT = completed(sizes("qwen3_next", 48, 16, 2, 2048, head_dim=256, max_position_embeddings=4096, **DELTA))

SIZED = {  # as published: bytes of a token in layers without a window, of one in layers with, of the state; by hand
    "Llama-3.1-8B": (LLAMA_8B, 32 * 2 * 8 * 128 * 2, 0, 0),
    "gpt-oss-20b": (
        sizes("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 12),
        *(12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2, 0),
    ),
    "Gemma-3-27B": (
        gemma3(hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        *(10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 0),
    ),
    "Qwen3-Next-80B": (
        QWEN3_NEXT,
        *(12 * 2 * 2 * 256 * 2, 0, 36 * (3 * (2 * 16 + 32) * 128 * 2 + 32 * 128 * 128 * 4)),
    ),
}

ONE_TABLE_CANNOT = {  # hold these, and why
    "gemma4": "layers differ in their KV heads or head_dim",
    "llama4": "3 layers attend in chunks",
    "deepseek_v32": "layers keep more than one cache each",
    "qwen3_next": "3 layers keep a recurrent state or that of a convolution",
}


@pytest.mark.parametrize("name", SIZED)
def test_groups_and_plan_of_a_published_config_have_the_bytes_worked_out_by_hand(name):
    """Of every family that mlx-lm has: test_sizing_bytes.py."""
    config, everywhere, limited, state = SIZED[name]
    groups = layer_groups(config)
    assert sum(group.token_nbytes for group in groups if group.size is None) == everywhere
    assert sum(group.token_nbytes for group in groups if group.size is not None) == limited
    assert sum(group.state_nbytes for group in groups) == state
    facts, text = describe_plan(config, "900GiB", max_len=10_000)
    assert json.loads(json.dumps(facts)) == facts
    assert max(map(len, text.splitlines())) < 120
    if not state:
        assert facts["refusal"] is None and facts["token_nbytes"] == everywhere + limited
        assert "in one table: every token of every layer" in text


@pytest.mark.parametrize("name", ONE_TABLE_CANNOT)
def test_plan_says_what_one_table_cannot_hold(name):
    why = ONE_TABLE_CANNOT[name]
    facts, text = describe_plan(config_of(name), "900GiB")
    assert facts["refusal"] == why and facts["token_nbytes"] is None and f"in one table: not possible, {why}" in text
    with pytest.raises(ValueError, match=rf"^\[config\] {why}.*kvpool\.config\.blocks_for$"):
        spec_from_config(config_of(name))


def test_groups_name_kind_size_heads_and_layers():
    config = SIZED["gpt-oss-20b"][0]
    window, full = layer_groups(config)
    shape = {"num_kv_heads": 8, "head_dim": 64, "v_head_dim": 64}
    assert window == LayerGroup("window", tuple(range(0, 24, 2)), "bfloat16", size=128, **shape)
    assert full == LayerGroup("full", tuple(range(1, 24, 2)), "bfloat16", **shape)
    state, attention = layer_groups(QWEN3_NEXT, dtype="float16")
    assert state.arrays == (StateArray((3, 8192), "float16"), StateArray((32, 128, 128), "float32"))
    assert attention.layers == tuple(range(3, 48, 4)) and attention.dtype == "float16"


def test_plan_of_windows_counts_what_stays_in_the_window():
    facts, text = describe_plan(SIZED["Gemma-3-27B"][0], "64GiB")
    needed = facts["sequence_nbytes"]
    assert needed["kvpool"] == 131072 * 62 * 8192
    assert needed["layer_groups"] == (131072 * 10 + (1024 + 16) * 52) * 8192
    assert facts["num_sequences"]["131072"] == {"kvpool": 1, "layer_groups": 6}
    assert "last 1024" in text and "62.00 GiB  in one table" in text


@pytest.mark.parametrize(
    ("name", "columns", "block_nbytes"),
    [  # 2 arrays of 10 + 52 layers, 12 of 12 + 12: tokens x heads x (K + V) x bytes
        ("Gemma-3-27B", 5 + 26, 2 * 16 * 16 * (128 + 128) * 2),
        ("gpt-oss-20b", 1 + 1, 12 * 16 * 8 * (64 + 64) * 2),
    ],
)
def test_plan_of_windows_shows_the_pool_with_layer_groups(name, columns, block_nbytes):
    memory = 2**34
    facts, text = describe_plan(SIZED[name][0], memory)
    usable = (memory // block_nbytes - 1) // columns
    arena = {"num_blocks": 1 + usable * columns, "columns": columns, "block_nbytes": block_nbytes}
    assert facts["arenas"] == [arena] and facts["num_blocks"] == 1 + usable
    assert facts["block_nbytes"] == columns * block_nbytes
    assert facts["num_tokens"] == facts["longest"] == 16 * usable
    assert facts["pool_nbytes"] == arena["num_blocks"] * block_nbytes <= memory
    assert memory < facts["pool_nbytes"] + columns * block_nbytes
    shown = f"{columns} x {block_nbytes / 1024:.2f} KiB for it; {1 + usable * columns} blocks = 16.00 GiB, 1 reserved"
    assert shown in text and f"room for {16 * usable} tokens" in text
    assert text.count("blocks = ") == 1 and f"serve: --num-blocks {1 + usable}\n" in text


def test_plan_of_states_takes_off_those_of_32_sequences_twice():
    facts, text = describe_plan(QWEN3_NEXT, "16GiB")
    state, block_nbytes = SIZED["Qwen3-Next-80B"][3], 16 * 24576
    usable = (2**34 - 64 * state) // block_nbytes - 1
    assert facts["num_blocks"] == 1 + usable and facts["arenas"][0]["block_nbytes"] == block_nbytes
    assert f"--num-blocks {1 + usable} --max-running 32\n" in text
    assert facts["budget_nbytes"] == 2**34


def test_plan_without_memory_for_a_pool_shows_none():
    facts, text = describe_plan(QWEN3_NEXT, "1GiB")
    assert facts["num_blocks"] is facts["longest"] is None and facts["arenas"] == []
    assert "no pool" in text and "--num-blocks" not in text
    only_states, text = describe_plan(config_of("mamba2"), "64GiB")
    assert only_states["num_blocks"] is only_states["block_nbytes"] is None and "keeps states only" in text


def test_plan_of_a_state_counts_it_once_per_sequence():
    facts, text = describe_plan(QWEN3_NEXT, "1GiB", max_len=4096)
    state = SIZED["Qwen3-Next-80B"][3]
    assert facts["sequence_nbytes"]["layer_groups"] == 4096 * 24576 + state
    assert facts["num_sequences"]["512"]["layer_groups"] == 2**30 // (512 * 24576 + state)
    assert facts["num_sequences"]["512"]["kvpool"] is None
    assert "a checkpoint of the state takes 73.69 MiB" in text and "sized from the given memory" in text


def test_plan_quantizes_what_layer_groups_keep_per_token():
    dense, quantized = (describe_plan(QWEN3_NEXT, "1GiB", k_bits=bits, v_bits=bits)[0]["groups"] for bits in (None, 8))
    assert quantized[1]["token_nbytes"] * 2 == dense[1]["token_nbytes"] * 1.0625
    assert quantized[0] == dense[0]


@pytest.mark.parametrize(
    ("size", "block_size", "num_tokens", "slots"),
    [
        *((128, 16, 64, 64), (128, 16, 128, 128), (128, 16, 129, 144), (128, 16, 9999, 144), (129, 16, 9999, 144)),
        *((130, 16, 9999, 160), (1, 16, 9999, 16), (5, 1, 9999, 5), (None, 16, 33, 48)),
    ],
)
def test_a_window_holds_the_blocks_that_it_can_touch(size, block_size, num_tokens, slots):
    group = LayerGroup("full" if size is None else "window", (0,), "float16", size=size)
    assert group.num_held_in_blocks(num_tokens, block_size) == slots
    if size is not None and num_tokens > size:
        starts = range(block_size)
        assert slots == block_size * max((start + size - 1) // block_size + 1 for start in starts)


def test_plan_takes_the_longest_context_by_whatever_name():
    assert describe_plan(LLAMA_8B, "64GiB")[0]["max_len"] == 8192
    with pytest.raises(ValueError, match="max_len is 0"):
        describe_plan(LLAMA_8B, "16GiB", max_len=0)
    unlimited = {name: value for name, value in config_of("mamba2").items() if name != "max_position_embeddings"}
    assert describe_plan(unlimited, "64GiB")[0]["max_len"] == 131072
    by_own_name = {name: value for name, value in config_of("gpt2").items() if name != "max_position_embeddings"}
    assert describe_plan(by_own_name | {"n_positions": 333}, "64GiB")[0]["max_len"] == 333


def test_spec_from_config_prefers_what_is_given():
    fields = LLAMA_8B | {"head_dim": 96, "dtype": "torch.float16"}
    assert spec_from_config(fields, block_size=32) == KVSpec(32, 8, 96, "float16", 32)
    assert spec_from_config(fields, dtype="float32").dtype == "float32"
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    assert spec_from_config(fields, dtype="float16") == KVSpec(2, 4, 64, "float16"), "without query heads"


def test_spec_from_config_reads_files_folders_and_text_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_8B, "vision_config": {}}))
    assert spec_from_config(tmp_path) == spec_from_config(str(tmp_path / "config.json")) == spec_from_config(LLAMA_8B)


def test_spec_from_config_reads_the_local_cache_of_the_hub(tmp_path, monkeypatch):
    folder = tmp_path / "huggingface" / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123")
    (folder / "snapshots" / "0123").mkdir(parents=True)
    (folder / "snapshots" / "0123" / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setenv("HOME", str(tmp_path))
    places = {"HF_HUB_CACHE": "$HOME/huggingface/hub", "HF_HOME": "~/huggingface", "XDG_CACHE_HOME": str(tmp_path)}
    for name in places:
        for other in places:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, places[name])
        assert spec_from_config("some/model") == spec_from_config(LLAMA_8B)
    for missing in ("some/other", "model", "../model", str(tmp_path / "model")):
        with pytest.raises(FileNotFoundError):
            spec_from_config(missing)


def test_spec_from_config_takes_the_dtype_of_the_text_model_before_that_of_all_parts():
    both = {"dtype": "float32", "text_config": LLAMA_8B}
    assert spec_from_config(both).dtype == "bfloat16"
    inner = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}
    assert spec_from_config(both | {"text_config": inner}).dtype == "float32"


NEEDED = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "torch_dtype")
MODEL = r"^\[config\] mlx-lm \S+ cannot size model_type"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({k: v for k, v in LLAMA_8B.items() if k != name}, rf"^\[config\] .*{name}.* (is missing|is in the config)")
            for name in NEEDED
        ),
        (LLAMA_8B | {"model_type": "qwen3"}, r"^\[config\] head_dim is missing"),
        (LLAMA_8B | {"hidden_size": 4097}, "hidden_size 4097 is no multiple of num_attention_heads 32"),
        (LLAMA_8B | {"layer_types": ["linear_attention", FULL]}, "layer_types has 'linear_attention', known are"),
        (LLAMA_8B | {"model_type": "qwen2", "layer_types": ["mamba", FULL]}, "layer_types has 'mamba', known are"),
        (LLAMA_8B | {"layer_types": 5}, r"^\[config\] layer_types has 5, known are"),
        (LLAMA_8B | {"layer_types": ["x" * 10_000]}, r"^\[config\] layer_types has .{0,80}\.\.\., known are .*$"),
        (LLAMA_8B | {"layer_types": [FULL] * 3}, r"^\[config\] layer_types has 3 items, the model 32 layers$"),
        (LLAMA_8B | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA_8B | {"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, the limit is 65536$"),
        (LLAMA_8B | {"layer_types": [SLIDING] * 32}, "sliding_window is missing"),
        (LLAMA_8B | {"model_type": 7}, r"^\[config\] model_type is missing or no string \(7\)"),
        (gemma3() | {"text_config": 5}, "text_config must be an object, got 5"),
        (config_of("dbrx") | {"attn_config": "x"}, "attn_config must be an object, got 'x'"),
        (config_of("dbrx") | {"attn_config": {}}, "kv_n_heads is missing"),
        (LLAMA_8B | {"model_type": "llama9"}, f"{MODEL} 'llama9': ValueError: .*not supported"),
        (LLAMA_8B | {"model_type": "x" * 10_000}, rf"{MODEL} .{{0,320}}$"),
        (sizes("glm", 2, 4, 4, 64) | {"model_type": "helium"}, f"{MODEL} 'helium': TypeError: .*'intermediate_size'"),
        (config_of("deepseek_v41"), r"^\[config\] cache 0 is a LayerCache, which is no kind of layer group$"),
    ],
)
def test_plan_refuses_what_would_be_sized_wrongly(fields, message):
    for read in (spec_from_config, lambda fields: describe_plan(fields, "16GiB")):
        with pytest.raises((ValueError, TypeError), match=message):
            read(fields)


@pytest.fixture
def no_mlx_lm(monkeypatch):
    """An environment without mlx-lm."""
    monkeypatch.setitem(sys.modules, "kvpool.adapters.mlx_lm.shapes", None)


READ = [  # without mlx-lm, in the forms that read otherwise
    *(name for name in OWN if name in _RULES),
    *(("llama", {"layer_types": None}), ("llama", {"layer_types": None, "num_key_value_heads": None})),
    *(("llama", {"layer_types": None, "head_dim": None}), ("gpt_oss", {"layer_types": None})),
    *(("olmo3", {"layer_types": None}), ("smollm3", {"layer_types": [FULL] * 4, "sliding_window": 24})),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24}),
]


@pytest.mark.parametrize("form", READ, ids=str)
def test_a_type_that_is_read_without_mlx_lm_has_the_groups_of_the_model(form, request):
    name, changed = (form, {}) if isinstance(form, str) else form
    config = config_of(name) | changed
    if name != "dbrx":  # which asks for values: the model is refused
        groups = layer_groups(config)
    else:
        with pytest.raises(ValueError, match=f"{MODEL} 'dbrx': ValueError: .eval. Attempting to eval"):
            groups_of_model(config, "bfloat16")
        groups = (LayerGroup("full", (0, 1, 2, 3), "bfloat16", num_kv_heads=2, head_dim=12, v_head_dim=12),)
    request.getfixturevalue("no_mlx_lm")
    assert layer_groups(config) == groups


@pytest.mark.usefixtures("no_mlx_lm")
def test_a_type_that_only_the_model_knows_is_refused_by_name_without_mlx_lm():
    with pytest.raises(ValueError, match=r"^\[config\] model_type 'qwen3_next' is not known without mlx-lm; .*KVSpec"):
        layer_groups(QWEN3_NEXT)


def test_a_model_without_caches_is_refused(monkeypatch):
    monkeypatch.setattr(model_sizes, "_shape_of", lambda model: ModelShape((), (), (), False))
    with pytest.raises(ValueError, match=r"^\[config\] no layer keeps anything$"):
        layer_groups(config_of("qwen3_5"))


def test_a_model_of_405_billion_weights_is_sized_without_memory():
    large = LLAMA_8B | {"num_hidden_layers": 126, "num_attention_heads": 128, "hidden_size": 16384}
    large |= {"intermediate_size": 53248, "vocab_size": 128256, "rms_norm_eps": 1e-5}
    mx.reset_peak_memory()
    (group,) = groups_of_model(large, "bfloat16")
    assert group.token_nbytes == 126 * 2 * 8 * 128 * 2
    assert mx.get_peak_memory() - mx.get_active_memory() < 2**20


def test_spec_from_config_of_a_bad_file_is_refused(tmp_path):
    for content, said in {
        b"{": "is not JSON",
        b"\x93NUMPY\xff\xfe": r"config\.json is not JSON: 'utf-8'",
        b'{"num_hidden_layers": ' + b"[" * 100_000: r"config\.json is nested too deeply",
        b"[1]": "holds list",
    }.items():
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            spec_from_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        spec_from_config(tmp_path / "nowhere.json")


def test_sizes_leave_the_random_numbers_of_a_program_alone():
    drawn = []
    for look in (False, True):
        mx.random.seed(0)
        if look:
            layer_groups(config_of("llama"))
        drawn.append(mx.random.uniform().item())
    assert drawn[0] == drawn[1]
