"""Arrays in and out: numpy, MLX where it is installed, and bfloat16, which numpy does not have."""

import sys
from typing import Any

import numpy as np

# bfloat16 as a numpy type: its bits under a field of that name. `to_bfloat16` and `from_bfloat16` convert.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

# The name of a type in Metal text, as MLX writes it.
METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "float32": "float",
    "bfloat16": "bfloat16_t",
}


def dtype_name(dtype: Any) -> str:
    """Return the name of a numpy or MLX dtype, as "bfloat16"; TypeError if Metal text has no such type."""
    if dtype == BFLOAT16 and isinstance(dtype, np.dtype):
        return "bfloat16"
    is_named = _is_of_mlx(dtype) or dtype == "bfloat16"
    name = str(dtype).rpartition(".")[2] if is_named else np.dtype(dtype).name
    if name not in METAL_TYPES:
        raise TypeError(f"[metal_kernel] no Metal type for dtype {dtype}, the types are {list(METAL_TYPES)}")
    return name


def numpy_dtype(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def _is_of_mlx(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "mlx"


def is_mlx_array(value: Any) -> bool:
    return _is_of_mlx(value) and hasattr(value, "shape")


def is_mlx_dtype(value: Any) -> bool:
    return _is_of_mlx(value) and not hasattr(value, "shape")


def to_numpy(value: Any) -> np.ndarray:
    """Return an input as a numpy array, without a copy where that is possible; scalars as MLX types them."""
    if isinstance(value, bool | int | float):
        return np.array(value, {bool: np.bool_, int: np.int32, float: np.float32}[type(value)])
    if is_mlx_array(value):
        mx = sys.modules["mlx.core"]
        if value.dtype == mx.bfloat16:
            return np.asarray(value.view(mx.uint16)).view(BFLOAT16)
        return np.asarray(value)
    array = np.asarray(value)
    return array.view(BFLOAT16) if array.dtype.name == "bfloat16" else array


def to_mlx(array: np.ndarray) -> Any:
    mx = sys.modules["mlx.core"]
    if array.dtype == BFLOAT16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def to_bfloat16(values: Any) -> np.ndarray:
    """Round float32 values to bfloat16, to nearest even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, quiet, rounded).astype(np.uint16).view(BFLOAT16)


def from_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return bfloat16 values as float32, exactly."""
    return (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array in C order, of the same shape (0-dimensional ones too)."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def spanned(array: np.ndarray) -> np.ndarray:
    """Return the memory between the first and the last element of a strided array, as a flat array of elements."""
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"[metal_kernel] an input has negative strides ({array.strides})")
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    elements = last // array.itemsize + 1 if array.size else 0
    return np.lib.stride_tricks.as_strided(array, (elements,), (array.itemsize,), writeable=False)
