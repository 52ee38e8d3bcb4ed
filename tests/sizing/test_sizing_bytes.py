"""What `layer_groups` computes from a config, against the bytes that mlx-lm's caches of that model hold."""

import copy

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from held_bytes import computed, measured
from tiny_files import build, gather_mm

from benchmarks.tiny_families import OWN, config_of
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.model_config import layer_groups, refusal_of

REFUSED = "deepseek_v41"  # one latent stands for several tokens


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
