"""What `kvpool plan` says of a pool, against what `install` finds in a tiny model of every file of mlx-lm."""

import copy
from dataclasses import replace

import pytest

pytest.importorskip("mlx_lm")

from tiny_files import build

from benchmarks.tiny_families import OWN, config_of
from kvpool.adapters.mlx_lm.layout import layout_of
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.model_config import layer_groups, refusal_of, spec_from_config


@pytest.mark.parametrize("name", sorted(OWN.keys() - {"deepseek_v41"}))  # which no config sizes
def test_plan_of_every_file_is_what_install_finds(name):
    config = config_of(name)
    shape = inspect_model(build(name, copy.deepcopy(config)))
    if refusal_of(layer_groups(config)):
        assert not shape.is_uniform
        return
    (found,) = layout_of(shape, 16, keeps_all=True).specs
    planned = spec_from_config(config)
    assert replace(planned, v_head_dim=planned.value_head_dim) == replace(found, v_head_dim=found.value_head_dim)
