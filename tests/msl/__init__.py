"""Runs Metal Shading Language compute kernels on a CPU, checks them and counts what they move. See README.md."""

from .arrays import BFLOAT16, from_bfloat16, to_bfloat16
from .fast import cuda_kernel, metal_kernel
from .launch import Bound, Kernel, Run, Traffic, settings
from .prepass import MetalError

__all__ = [
    "BFLOAT16",
    "Bound",
    "Kernel",
    "MetalError",
    "Run",
    "Traffic",
    "cuda_kernel",
    "from_bfloat16",
    "metal_kernel",
    "settings",
    "to_bfloat16",
]
