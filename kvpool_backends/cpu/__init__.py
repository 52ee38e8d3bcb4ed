"""Native CPU kernels: `CPUBackend` owns its memory, `BlockStore` works on anybody's, `dense` on dense arrays."""

from kvpool_backends.cpu._kernels import (
    BlockStore,
    base_arrays,
    base_shapes,
    default_isa,
    isas,
    num_threads,
    read_sum,
    set_num_threads,
)
from kvpool_backends.cpu.backend import CPUBackend, default_layout
from kvpool_backends.cpu.dense import attention_with_scores, quantized_attention_with_scores

__all__ = [
    "BlockStore",
    "CPUBackend",
    "attention_with_scores",
    "base_arrays",
    "base_shapes",
    "default_isa",
    "default_layout",
    "isas",
    "num_threads",
    "quantized_attention_with_scores",
    "read_sum",
    "set_num_threads",
]
