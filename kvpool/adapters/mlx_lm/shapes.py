"""The arrays of a model's caches, found by tracing the model; and what its layers keep, from its config alone.

MLX is lazy, so a model that is built from its config and called gives the arrays of its caches shapes and types and no
bytes. No weights are loaded. A model file that asks for a value on the way, such as dbrx for the experts of a token, is
refused at that place: the call is traced like a function that ``mx.compile`` compiles, and MLX evaluates nothing in
those.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import _get_classes

from kvpool.adapters.mlx_lm.hooks import Hook
from kvpool.config import LONGEST, KVSpec
from kvpool.eviction import SlidingWindow
from kvpool.sizing import LayerGroup, StateArray

ATTENTION = {KVCache: ("full", ""), RotatingKVCache: ("window", "max_size"), ChunkedKVCache: ("chunk", "chunk_size")}
"""Classes of mlx-lm whose keys and values a pool holds: kind of layer group, and the attribute with its size."""

LATENT_PROJECTIONS = ("MultiLinear", "QuantizedMultiLinear")
"""Classes of mlx-lm that expand latents. By name: older releases lack the module."""

APART = ("mlx_lm.models.afm7", "mlx_lm.models.gpt_bigcode", "mlx_lm.models.minimax_m3_vl")
"""Models that count columns of the batch where they mean positions of a row: their rows must run one by one."""


COUNTS_CONTEXT = ("mlx_lm.models.afm7",)
"""Models that take positions from the length of a context: no token of it may leave."""


class Shape(NamedTuple):
    """Keys and values of one token in one layer. With `latent`: a latent and its rotary part."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    latent: bool = False

    def spec(self, num_layers: int, block_size: int) -> KVSpec:
        """Return the spec of a storage with so many layers."""
        dims = self.num_kv_heads, self.head_dim
        return KVSpec(num_layers, *dims, self.dtype, block_size, max(self.v_head_dim, 1), latent=self.latent)


class StateShape(NamedTuple):
    """One array of a recurrent layer's state, of one sequence."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.size


class Leaf(NamedTuple):
    """One cache of a model: an entry of its list of caches, or of a CacheList in it.

    The kinds "full", "window" and "chunk" have keys and values, in a pool, "state" the arrays of a recurrent layer.
    "opaque" is anything else, kept whole.
    """

    kind: str
    name: str  # its class in mlx-lm
    size: int = 0  # tokens of the window or the chunk; arrays of the state
    shape: Shape | None = None  # of keys and values
    arrays: tuple[StateShape | None, ...] = ()  # of the state, None for one that stays empty
    keep: int | None = None  # leading tokens that are read beside a window of `ModelShape.sliding`

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    @property
    def window(self) -> int | None:
        """Tokens of the attention window, None without one."""
        return self.size if self.kind == "window" else None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The caches of a model."""

    leaves: tuple[Leaf, ...]
    tree: tuple[Any, ...]  # the list of caches: the number of its leaf for each cache, a tuple for a CacheList
    fresh: tuple[Any, ...]  # an empty cache for each leaf, as mlx-lm makes it
    is_apart: bool  # whether the model is right only for one row at a time

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of one row, whatever its length."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def is_uniform(self) -> bool:
        """Whether each layer has one cache, of keys and values of one shape: one table can serve all of them."""
        kinds = {leaf.kind for leaf in self.leaves}
        is_flat = all(isinstance(node, int) for node in self.tree)
        return is_flat and kinds <= {"full", "window"} and len({leaf.shape for leaf in self.leaves}) == 1

    def sliding(self, window: SlidingWindow) -> ModelShape:
        """Return the caches of the model where layers that read every token read a window: ValueError without any."""
        if all(leaf.kind != "full" for leaf in self.leaves):
            raise ValueError(
                f"[install] SlidingWindow is for full attention, this model has no layer that keeps every token: leave "
                f"eviction out ({self.describe()})"
            )
        how: dict[str, Any] = {"kind": "window", "size": window.window, "keep": window.sink}
        leaves = (leaf._replace(**how) if leaf.kind == "full" else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    def describe(self) -> str:
        """Return the kinds of layers, in words."""
        texts = []
        for leaf in self.leaves:
            size = f"({leaf.size})" if leaf.size else ""
            shape = "" if leaf.shape is None else f" of {leaf.shape.num_kv_heads} x {leaf.shape.head_dim}"
            texts.append(f"{leaf.name}{size}{shape}")
        return ", ".join(f"{n} {text}" for text, n in Counter(texts).items())


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """Yield the caches of a list, and those of each CacheList in its place."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves_of(cache.caches)
        else:
            yield cache


def numbers_in(node: Any) -> list[int]:
    """Return the numbers of the leaves in a node of `ModelShape.tree`."""
    return [node] if isinstance(node, int) else [number for inner in node for number in numbers_in(inner)]


def build(tree: Sequence[Any], make: Callable[[int], Any]) -> list[Any]:
    """Return a list of caches like the model's, with ``make(number)`` for each leaf."""
    return [make(node) if isinstance(node, int) else CacheList(*build(node, make)) for node in tree]


def inspect_model(model: Any, tokens: mx.array | None = None) -> ModelShape:
    """Return what a model's cache is made of: TypeError if this is no model.

    Found by calling the model on `tokens`, by default one, with mlx-lm's own caches. Nothing is computed.
    """
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        raise TypeError(f"[install] model must be one that mlx_lm.load returns, got {type(model).__name__}")
    caches = Hook.stock_caches(model)
    found = list(leaves_of(caches))
    _refuse_change(found, list(leaves_of(Hook.stock_caches(model))))
    fresh = copy.deepcopy(found)
    tokens = mx.zeros((1, 1), mx.int32) if tokens is None else tokens
    model(tokens, cache=caches)
    latents = _latent_dims(model)
    leaves = tuple(_leaf(cache, latents) for cache in found)
    states = [i for i, leaf in enumerate(leaves) if leaf.kind == "state"]
    if states:
        model(tokens, cache=caches)
        growing = {i for i in states if state_shapes(found[i].cache) != leaves[i].arrays}
        leaves = tuple(Leaf("opaque", leaf.name) if i in growing else leaf for i, leaf in enumerate(leaves))
    tree = _numbered(caches, iter(range(len(found))))
    return ModelShape(leaves, tree, tuple(fresh), type(model).__module__ in APART)


def _refuse_change(found: Sequence[Any], again: Sequence[Any]) -> None:
    """Raise if a model that was asked for its caches twice made others: nobody can say what the next ones are."""
    names = [[type(cache).__name__ for cache in caches] for caches in (found, again)]
    for number, (one, other) in enumerate(zip_longest(*names, fillvalue="none")):
        if one != other:
            raise ValueError(
                f"[install] cache {number} of the model is a {one}, and a {other} when it is made again: make_cache "
                "must make the same classes each time"
            )


def _numbered(caches: Sequence[Any], numbers: Iterator[int]) -> tuple[Any, ...]:
    return tuple(
        _numbered(cache.caches, numbers) if isinstance(cache, CacheList) else next(numbers) for cache in caches
    )


def _latent_dims(model: Any) -> set[int]:
    """Return the elements of the latents that a model expands to keys and values of its heads. Empty without any."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return {module.weight.shape[1] for module in modules if type(module).__name__ in LATENT_PROJECTIONS}


def _leaf(cache: Any, latents: Collection[int]) -> Leaf:
    """Describe a cache that has seen one token."""
    name = type(cache).__name__
    if type(cache) is ArraysCache:
        return Leaf("state", name, len(cache.cache), arrays=state_shapes(cache.cache))
    if type(cache) in ATTENTION and getattr(cache, "keep", 0) == 0 and cache.keys is not None:
        k, v = cache.keys, cache.values
        kind, size = ATTENTION[type(cache)]
        if k.dtype == v.dtype and mx.issubdtype(k.dtype, mx.floating) and k.shape[1] == v.shape[1]:
            is_latent = k.shape[1] == 1 and k.shape[3] in latents and v.shape[3] > 0
            shape = Shape(k.shape[1], k.shape[3], v.shape[3], str(k.dtype).removeprefix("mlx.core."), is_latent)
            return Leaf(kind, name, getattr(cache, size) if size else 0, shape)
    return Leaf("opaque", name)


def state_shapes(arrays: Sequence[mx.array | None]) -> tuple[StateShape | None, ...]:
    """Return what the arrays ``[B, ...]`` of a state are. One that grows with its sequence is not a row of a batch."""
    return tuple(None if x is None else StateShape(x.shape[1:], x.dtype) for x in arrays)


def max_positions(model: Any) -> int | None:
    """Return the most tokens that a model supports, None if it does not say."""
    args = getattr(model, "args", None)
    inner = getattr(args, "text_config", None)  # of a model that takes images, too
    held = [one if isinstance(one, dict) else getattr(one, "__dict__", {}) for one in (args, inner)]
    return next((one[name] for one in held for name in LONGEST if isinstance(one.get(name), int)), None)


def with_bits(
    spec: KVSpec,
    call: str = "install",
    /,
    *,
    kv_bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    quant_group_size: int | None = None,
    **unknown: Any,
) -> KVSpec:
    """Return `spec` with quantized keys, values, or both (`kv_bits`). See docs/eviction.md."""
    if unknown:
        raise TypeError(f"[{call}] unexpected keyword argument {next(iter(unknown))!r}")
    if kv_bits is not None and (k_bits, v_bits) != (None, None):
        raise TypeError(f"[{call}] kv_bits is for both, give it or k_bits and v_bits")
    if kv_bits is not None:
        k_bits = v_bits = kv_bits
    group_size = spec.quant_group_size if quant_group_size is None else quant_group_size
    return replace(spec, k_bits=k_bits, v_bits=v_bits, quant_group_size=group_size)


def require_bits(spec: KVSpec, **bits: int | None) -> None:
    """Raise unless `spec` has these bits already. Without any bits, accept all."""
    if all(value is None for value in bits.values()):
        return
    asked = with_bits(spec, "make_cache", **bits)
    if asked != spec:
        shown = [f"k_bits {s.k_bits}, v_bits {s.v_bits}, quant_group_size {s.quant_group_size}" for s in (asked, spec)]
        raise ValueError(f"[make_cache] {shown[0]} are asked for, the blocks have {shown[1]}: give them to install")


# ---------------------------------------------------------------------- sizes, from a config

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
