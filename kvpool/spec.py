"""`KVSpec`: size and memory layout of the KV of one token, dense or quantized.

All sizes are Python integers (no overflow) and carry their unit in the name: ``_nbytes``, ``num_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}  # name: bytes per element
LAYOUTS = ("NHD", "HND", "block")
QUANT_BITS = (4, 8)
QUANT_GROUP_SIZES = (32, 64, 128)
WORD_BITS = 32  # quantized elements are packed into words of uint32, the first one lowest

_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """The place of one stored plane in its base array. Offset and strides are in elements of the plane.

    Element (layer, block, slot, head, d) of the plane is element ``offset + layer * layer_stride + block *
    block_stride + slot * slot_stride + head * head_stride + d`` of the base array (64-bit arithmetic). With
    `per_layer`, each layer has a base array of its own and ``layer_stride`` is 0. The base array of layout "block"
    holds bytes.
    """

    array: str  # name of the base array; planes with the same name share it
    shape: tuple[int, ...]  # of the base array, C-contiguous
    per_layer: bool
    offset: int
    layer_stride: int
    block_stride: int
    slot_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """One plane of a layer as it is stored: keys, values, or their scales or biases."""

    name: str  # "k", "k_scales", "k_biases", "v", "v_scales", "v_biases"
    dim: int  # elements per token and head
    dtype: str  # that of the spec, or "uint32" for packed words
    itemsize_nbytes: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Size and layout of the KV of one layer group of a model.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As in the model; `head_dim` is that of the keys.
    dtype : {"float32", "float16", "bfloat16", "float8_e4m3"}
        Of the stored elements. float8 has 4 bits of exponent, 3 of mantissa and no infinity. Its largest value is 448;
        larger values are stored as 448. Queries and results are floats of 16 or 32 bits.
    block_size : int
        Tokens per block, any value >= 1.
    v_head_dim : int, optional
        Head dimension of the values, `head_dim` by default.
    layout : {None, "NHD", "HND", "block"}
        Order of the axes in memory, see Notes. None: the backend chooses, and its own `spec` says what; without a
        backend it is that of "NHD".
    k_bits, v_bits : {None, 4, 8}
        Keys or values are stored as they are (None) or quantized to so many bits.
    quant_group_size : {32, 64, 128}
        Elements that share a scale and a bias; divides the head dimension of what is quantized.
    latent : bool
        Of a model with latent attention: the plane of the keys holds the latent of a token (`head_dim` elements), that
        of the values its rotary part (`v_head_dim`). A key is both, one behind the other; a value is the latent.

    Raises
    ------
    TypeError, ValueError
        ``[KVSpec] ...`` for a wrong type, a value < 1, an unknown name, bits or groups that do not fit, or a block of
        2^63 bytes and more.

    Notes
    -----
    Two planes per layer, k and v. A quantized one has three: words, scales, biases, as ``mx.quantize(x, group_size,
    bits)`` makes them of `x` in `dtype`. D elements are ``D * bits / 32`` words of uint32, the first element in the
    lowest bits, and ``D / group_size`` scales and biases of `dtype`. Each of these planes is laid out like a plane of
    that many elements per head (`stored_planes`). docs/backends.md of the source tree has the arithmetic.

    The layouts differ in strides only (`plane_layout`); with S = block_size, H = num_kv_heads:

    - ``NHD``: per layer and plane ``[num_blocks, S, H, D]``. A token is one contiguous store, a block one
      contiguous copy.
    - ``HND``: per layer and plane ``[num_blocks, H, S, D]``, head-major.
    - ``block``: one array of bytes, ``[num_blocks, block_nbytes]``. Row b holds block b as `export_blocks` returns it:
      layer by layer, plane by plane, each ``[S, H, D]``. Several specs can share the rows of one array
      (`kvpool.group_storage`).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    block_size: int = 16
    v_head_dim: int | None = None
    layout: str | None = None
    k_bits: int | None = None
    v_bits: int | None = None
    quant_group_size: int = 64
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"):
            value = getattr(self, name)
            if value is None and name == "v_head_dim":
                continue
            object.__setattr__(self, name, checked_int("KVSpec", name, value))
        _one_of("KVSpec", "dtype", self.dtype, tuple(DTYPES))
        if self.layout is not None:
            _one_of("KVSpec", "layout", self.layout, LAYOUTS)
        if not isinstance(self.latent, bool):
            raise TypeError(f"[KVSpec] latent must be a bool, got {type(self.latent).__name__} ({self.latent!r})")
        if self.latent and self.num_kv_heads != 1:
            raise ValueError(f"[KVSpec] latent attention has 1 KV head, not num_kv_heads {self.num_kv_heads}")
        self._check_quantization()
        if self.layout == "block" and any(begin % plane.itemsize_nbytes for plane, begin in self._places_in_a_block()):
            raise ValueError(
                f"[KVSpec] layout 'block' cannot align words of quantized planes (head_dim {self.head_dim}, block_size "
                f"{self.block_size}, k_bits {self.k_bits}, v_bits {self.v_bits}), choose another layout"
            )
        if self.block_nbytes > _MAX_INT64:
            raise ValueError(f"[KVSpec] one block has {self.block_nbytes} bytes, the limit is 2^63 - 1")

    def _check_quantization(self) -> None:
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) is not None:
                _one_number("KVSpec", name, getattr(self, name), QUANT_BITS, "None or ")
        if self.is_quantized and self.dtype == "float8_e4m3":
            raise ValueError(
                f"[KVSpec] dtype 'float8_e4m3' has too few digits for the scales of quantized planes (k_bits "
                f"{self.k_bits}, v_bits {self.v_bits}), choose another dtype or None"
            )
        _one_number("KVSpec", "quant_group_size", self.quant_group_size, QUANT_GROUP_SIZES)
        for name, bits, dim in (
            ("head_dim", self.k_bits, self.head_dim),
            ("v_head_dim", self.v_bits, self.value_head_dim),
        ):
            if bits is not None and dim % self.quant_group_size:
                raise ValueError(
                    f"[KVSpec] {name} is {dim}, not a multiple of quant_group_size {self.quant_group_size}: a group of "
                    f"{bits}-bit elements lies in one head"
                )

    @property
    def value_head_dim(self) -> int:
        """Head dimension of the values, never None."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query: those of a key."""
        return self.head_dim + self.value_head_dim if self.latent else self.head_dim

    @property
    def result_dim(self) -> int:
        """Elements of a result of attention: those of a value."""
        return self.head_dim if self.latent else self.value_head_dim

    @property
    def planes(self) -> tuple[tuple[str, int], ...]:
        """(name, head dimension) of keys and values, as they are given to `write` and come from `gather`."""
        return (("k", self.head_dim), ("v", self.value_head_dim))

    @property
    def bits(self) -> tuple[int | None, int | None]:
        """Bits of quantized keys and of quantized values."""
        return (self.k_bits, self.v_bits)

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are quantized."""
        return self.bits != (None, None)

    @property
    def stored_planes(self) -> tuple[StoredPlane, ...]:
        """The planes of a layer as they are stored, in the order of `export_blocks`."""
        stored = []
        for (name, dim), bits in zip(self.planes, self.bits, strict=True):
            if bits is None:
                stored.append(StoredPlane(name, dim, self.dtype, self.itemsize_nbytes))
                continue
            stored.append(StoredPlane(name, dim * bits // WORD_BITS, "uint32", WORD_BITS // 8))
            for what in ("scales", "biases"):
                groups = dim // self.quant_group_size
                stored.append(StoredPlane(f"{name}_{what}", groups, self.dtype, self.itemsize_nbytes))
        return tuple(stored)

    @property
    def storage(self) -> str:
        """The stored form in words: ``float16``, or ``float16, keys 8 bits, values 4 bits, groups of 64``."""
        if not self.is_quantized:
            return self.dtype
        parts = [f"{name} {bits} bits" for name, bits in zip(("keys", "values"), self.bits, strict=True) if bits]
        return f"{self.dtype}, {', '.join(parts)}, groups of {self.quant_group_size}"

    def describe(self, num_blocks: int) -> str:
        """One line about a pool of `num_blocks` blocks, for the ``repr`` of backends."""
        heads = f"{self.num_kv_heads} x {self.head_dim}"
        if self.latent:
            heads = f"a latent of {self.head_dim} and {self.value_head_dim}"
        return (
            f"{num_blocks} blocks of {self.block_size} tokens, {self.num_layers} layers of {heads} in {self.storage}, "
            f"{self.layout or 'NHD'}, {self.pool_nbytes(num_blocks)} bytes"
        )

    @property
    def itemsize_nbytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return DTYPES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token takes in all layers and planes."""
        per_head = sum(plane.dim * plane.itemsize_nbytes for plane in self.stored_planes)
        return self.num_layers * self.num_kv_heads * per_head

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers and planes."""
        return self.block_size * self.token_nbytes

    def in_layout(self, layout: str) -> KVSpec:
        """This spec, in `layout` if it has none."""
        return self if self.layout is not None else replace(self, layout=layout)

    def pool_nbytes(self, num_blocks: int) -> int:
        """Bytes of the whole storage."""
        return num_blocks * self.block_nbytes

    def _places_in_a_block(self) -> list[tuple[StoredPlane, int]]:
        """The stored planes of the first two layers, each with the byte where it begins in a row of `export_blocks`."""
        places, begin = [], 0
        for plane in self.stored_planes * 2:
            places.append((plane, begin))
            begin += self.block_size * self.num_kv_heads * plane.dim * plane.itemsize_nbytes
        return places

    @property
    def array_block_nbytes(self) -> int:
        """Bytes of one block in the largest base array: devices limit the size of a single array."""
        return max(prod(shape) * itemsize for shape, _, itemsize in self.base_arrays(1))

    def plane_layout(self, plane: str, num_blocks: int) -> PlaneLayout:
        """Base array and strides of a stored plane, such as ``"k"``, in a pool of `num_blocks` blocks."""
        dims = {stored.name: stored.dim for stored in self.stored_planes}
        _one_of("plane_layout", "plane", plane, tuple(dims))
        heads, slots, dim = self.num_kv_heads, self.block_size, dims[plane]
        if self.layout == "block":
            stored, begin = next(place for place in self._places_in_a_block() if place[0].name == plane)
            size, block = stored.itemsize_nbytes, self.block_nbytes
            strides = (block // self.num_layers // size, block // size, heads * dim, dim)
            return PlaneLayout("block", (num_blocks, block), False, begin // size, *strides)
        if self.layout == "HND":
            shape, strides = (num_blocks, heads, slots, dim), (0, heads * slots * dim, dim, slots * dim)
        else:
            shape, strides = (num_blocks, slots, heads, dim), (0, slots * heads * dim, heads * dim, dim)
        return PlaneLayout(plane, shape, True, 0, *strides)

    def base_arrays(self, num_blocks: int) -> list[tuple[tuple[int, ...], str, int]]:
        """Shape, dtype and bytes of an element of every base array: layer by layer, and inside a layer plane by plane.

        The dtype is that of the stored plane. Layout "block" has one array, of uint8. See `base_number`.
        """
        if self.layout == "block":
            return [((num_blocks, self.block_nbytes), "uint8", 1)]
        planes = self.stored_planes
        shapes = [self.plane_layout(plane.name, num_blocks).shape for plane in planes]
        return [(shape, x.dtype, x.itemsize_nbytes) for shape, x in zip(shapes, planes, strict=True)] * self.num_layers

    def base_number(self, layer: int, plane: int) -> int:
        """Which of `base_arrays` holds the stored plane with the number `plane` of a layer."""
        return 0 if self.layout == "block" else layer * len(self.stored_planes) + plane


# ---------------------------------------------------------------------- checks


def checked_int(call: str, name: str, value: Any, least: int = 1) -> int:
    """`value` as an int in the range ``least .. 2^63 - 1``. A bool is refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"[{call}] {name} must be an int, got {type(value).__name__} ({value!r})")
    number = index(value)
    if not least <= number <= _MAX_INT64:
        raise ValueError(f"[{call}] {name} is {number}, the range is {least} .. 2^63 - 1")
    return number


def _one_of(call: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"[{call}] {name} must be a str, got {type(value).__name__} ({value!r})")
    if value not in known:
        raise ValueError(f"[{call}] {name} is {value!r}, known are {', '.join(known)}")


def _one_number(call: str, name: str, value: Any, known: tuple[int, ...], besides: str = "") -> None:
    listed = f"{besides}{' or '.join(map(str, known))}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"[{call}] {name} must be {listed}, got {type(value).__name__} ({value!r})")
    if value not in known:
        raise ValueError(f"[{call}] {name} is {value}, it must be {listed}")
