"""What `layer_groups` computes from a config, against the bytes that mlx-lm's caches of that model hold."""

import copy
from collections import Counter

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from benchmarks import tiny_families
from benchmarks.tiny_families import OWN, config_of
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.sizing import layer_groups, refusal_of

REFUSED = "deepseek_v41"  # one latent stands for several tokens
GATHER_MM = mx.gather_mm
KINDS = {KVCache: "full", RotatingKVCache: "window", ChunkedKVCache: "chunk"}


def flat(caches):
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from flat(cache.caches)
        else:
            yield cache


def fed(model, num_tokens, compute=False):
    """The caches of a sequence of so many tokens: a prompt and a step. Sizes are known before values are computed."""
    caches = make_prompt_cache(model)
    for first, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
        logits = model(mx.array([[(7 * i) % 90 + 1 for i in range(first, end)]]), cache=caches)
        if compute:
            mx.eval(logits)
    return [cache for cache in flat(caches) if not is_unused(cache)]


def is_unused(cache):
    return type(cache) in KINDS and cache.keys is None


def key_of(cache):
    """What tells the group of a cache."""
    if isinstance(cache, ArraysCache):
        return ("state", tuple((array.shape[1:], str(array.dtype)[9:]) for array in cache.cache if array is not None))
    keys, values = cache.keys, cache.values
    size = getattr(cache, "max_size", getattr(cache, "chunk_size", None))
    return (KINDS[type(cache)], size, keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype)[9:])


def key_of_group(group):
    if group.kind == "state":
        return ("state", tuple((array.shape, array.dtype) for array in group.arrays))
    return (group.kind, group.size, group.num_kv_heads, group.head_dim, group.v_head_dim, group.dtype)


def measured(model, num_tokens, compute=False):
    """Bytes of the tokens that mlx-lm holds, by group."""
    held = Counter()
    for cache in fed(model, num_tokens, compute):
        key = key_of(cache)
        if key[0] == "state":
            held[key] += cache.nbytes
            continue
        size = key[1] or num_tokens
        rows = min(cache.offset, size)
        held[key] += cache.nbytes // cache.keys.shape[2] * rows
    return held


def computed(groups, num_tokens):
    """The same from a config."""
    held = Counter()
    for group in groups:
        held[key_of_group(group)] += min(num_tokens, group.size or num_tokens) * group.token_nbytes + group.state_nbytes
    return held


def build(name, config):
    """The model of mlx-lm's file, with its own random weights in bfloat16 where a checkpoint would have them so."""
    model = tiny_families.build(name, config)
    keeps = getattr(model, "cast_predicate", lambda path: True)

    def cast(path, weight):
        return weight.astype(mx.bfloat16) if keeps(path) and mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map_with_path(cast, model.parameters()))
    model.eval()
    return model


def gather_mm(x, weights, *arguments, **options):
    """``mx.gather_mm`` in 16 bits, which MLX has on a GPU only."""
    return GATHER_MM(x.astype(mx.float32), weights.astype(mx.float32), *arguments, **options).astype(x.dtype)


def difference(name, lengths, compute=False):
    """(length, computed, measured) at the first length where they differ, None if there is none."""
    config = config_of(name)
    groups, model = layer_groups(config), build(name, copy.deepcopy(config))
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


@pytest.mark.parametrize("name", sorted(OWN.keys() - {REFUSED}))
def test_plan_of_every_file_refuses_one_table_where_install_does(name):
    shape = inspect_model(build(name, config_of(name)))
    assert (refusal_of(layer_groups(config_of(name))) == "") == shape.is_uniform


@pytest.mark.long
@pytest.mark.parametrize("name", COMPUTED)
def test_bytes_are_the_same_when_values_are_computed(name, monkeypatch):
    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    assert difference(name, (70,), compute=True) is None
