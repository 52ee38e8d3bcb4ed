"""Native CPU kernels: `CPUBackend` owns its memory, `BlockStore` works on anybody's."""

from kvpool_backends.cpu._kernels import (
    BlockStore,
    default_isa,
    isas,
    num_threads,
    read_sum,
    set_num_threads,
)
from kvpool_backends.cpu.backend import CPUBackend, default_layout

__all__ = [
    "BlockStore",
    "CPUBackend",
    "default_isa",
    "default_layout",
    "isas",
    "num_threads",
    "read_sum",
    "set_num_threads",
]
