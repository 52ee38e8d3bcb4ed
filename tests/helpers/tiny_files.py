"""The tiny models of `benchmarks.tiny_families` as checkpoints have them: with weights of 16 bits."""

import mlx.core as mx
from mlx.utils import tree_map_with_path

from benchmarks import tiny_families


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


GATHER_MM = mx.gather_mm
