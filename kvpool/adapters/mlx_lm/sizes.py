"""What the layers of a model keep, read from the model itself: it is built from its config, and called.

MLX is lazy, so the arrays of the model and of its caches get shapes and types and no bytes. No weights are loaded. A
model file that asks for a value on the way, such as dbrx for the experts of a token, is refused at that place: the call
is traced like a function that ``mx.compile`` compiles, and MLX evaluates nothing in those.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes

from kvpool.adapters.mlx_lm.shapes import Leaf, ModelShape, inspect_model, numbers_in
from kvpool.sizing import LayerGroup, StateArray

_TOKENS = 8  # of a call: enough for a state that remembers several


def groups_of_model(config: Mapping[str, Any], dtype: str) -> tuple[LayerGroup, ...]:
    """Return the layer groups of the model that a config describes, with weights of `dtype`.

    ValueError: mlx-lm has no file for it, cannot build or call it, or a layer keeps what no group here is.
    """
    try:
        shape = _shape_of(_built(config, dtype))
    except Exception as error:  # of a model file, given an incomplete or a wrong config: of any kind
        what = f"mlx-lm {mlx_lm.__version__} cannot size model_type {str(config.get('model_type'))[:80]!r}"
        raise ValueError(f"[config] {what}: {type(error).__name__}: {str(error)[:200]}") from error
    members: dict[Leaf, list[int]] = {}
    for number, node in enumerate(shape.tree):
        for leaf in numbers_in(node):
            members.setdefault(shape.leaves[leaf], []).append(number)
    if not members:
        raise ValueError("[config] no layer keeps anything")
    return tuple(_group(leaf, tuple(layers), dtype) for leaf, layers in members.items())


def _built(config: Mapping[str, Any], dtype: str) -> Any:
    """Return the model as a checkpoint of `dtype` would make it."""
    fields = copy.deepcopy(dict(config))  # some classes change it
    model_class, arguments = _get_classes(fields)
    with ThreadPoolExecutor(1) as apart:  # with random numbers of its own: the caller's go on
        model = apart.submit(lambda: model_class(arguments.from_dict(fields))).result()
    is_cast, target = getattr(model, "cast_predicate", lambda path: True), getattr(mx, dtype)

    def cast(path: str, weight: mx.array) -> mx.array:
        return weight.astype(target) if is_cast(path) and mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map_with_path(cast, model.parameters()))
    return model


def _shape_of(model: Any) -> ModelShape:
    found: list[ModelShape] = []

    def call(tokens: mx.array) -> mx.array:
        found.append(inspect_model(model, tokens))
        return tokens

    mx.compile(call)(mx.zeros((1, _TOKENS), mx.int32))
    return found[0]


def _group(leaf: Leaf, layers: tuple[int, ...], dtype: str) -> LayerGroup:
    if leaf.kind == "state":
        kept = [(array.shape, str(array.dtype).removeprefix("mlx.core.")) for array in leaf.arrays if array is not None]
        return LayerGroup("state", layers, dtype, arrays=tuple(StateArray(*array) for array in kept))
    if leaf.shape is None:
        raise ValueError(f"[config] cache {layers[0]} is a {leaf.name}, which is no kind of layer group")
    heads, k, v, dtype, is_latent = leaf.shape
    return LayerGroup(leaf.kind, layers, dtype, leaf.size or None, 0, heads, k, v, latent=is_latent)
