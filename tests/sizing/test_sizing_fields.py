"""Configs that leave out a field, or have null for it: `layer_groups` reads them as mlx-lm does, or refuses them."""

import contextlib
import copy

import pytest

pytest.importorskip("mlx_lm")

from held_bytes import computed, measured
from tiny_files import build

from benchmarks.tiny_families import OWN, config_of
from kvpool.model_config import layer_groups

NOT_READ_BY_MLX_LM = {"model_type", "dtype"}


def without(name, field, has_null):
    config = copy.deepcopy(config_of(name))
    fields = config.get("text_config", config)
    del fields[field]
    if has_null:
        fields[field] = None
    return config


@pytest.mark.parametrize("has_null", [False, True])
@pytest.mark.parametrize("name", sorted(OWN))
def test_a_config_without_a_field_is_read_as_mlx_lm_reads_it(name, has_null):
    whole = config_of(name)
    for field in sorted(set(whole.get("text_config", whole)) - NOT_READ_BY_MLX_LM):
        config = without(name, field, has_null)
        try:
            theirs = measured(build(name, copy.deepcopy(config)), 30)
        except Exception:  # of any kind: mlx-lm needs the field
            continue
        if field == "num_hidden_layers":  # beside a list with an item per layer
            with contextlib.suppress(ValueError):
                assert computed(layer_groups(config), 30) == theirs
            continue
        assert computed(layer_groups(config), 30) == theirs, field
