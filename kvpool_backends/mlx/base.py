"""`BaseBackend`: what all routes of the mlx backend share. `kvpool_backends.mlx` chooses the route."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.protocol import Capabilities
from kvpool.spec import KVSpec
from kvpool_backends.checks import checked_rows, checked_storage
from kvpool_backends.mlx.storage import DTYPES, PoolMemory


class MemoryReport(NamedTuple):
    """Memory of the pool, and MLX's own counts, in bytes."""

    pool_nbytes: int  # blocks * bytes per block
    mlx_peak_nbytes: int  # mx.get_peak_memory(): everything that the process does in MLX, not the pool alone
    mlx_active_nbytes: int  # mx.get_active_memory()
    pool_copies: int  # pool arrays that MLX was seen to copy, see `settle`; always 0 by the kernel route


class BaseBackend:
    """KV storage in MLX's memory, by one of the routes. Implements `kvpool.protocol.KVBackend`.

    Parameters
    ----------
    spec, num_blocks, storage, metal_kernel
        See `kvpool_backends.mlx.MLXBackend`.

    Attributes
    ----------
    route : {"metal", "kernels", "plain"}
    writes : str
        How tokens are written into the pool, and what that costs.
    dtype : mx.Dtype
        Of the stored values.
    pool_copies : int
        Pool arrays that were found copied so far, see `settle`; 0 where writes are in place.

    Raises
    ------
    ValueError
        What `capabilities` refuses, or `num_blocks` < 1.
    """

    required_formats: tuple[str, ...] = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens")
    capabilities: Capabilities
    route: str
    writes = "in place"
    _pool: PoolMemory

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        storage: np.ndarray | None = None,
        metal_kernel: Any = None,
    ) -> None:
        by = f" by the {self.route} route"
        self.num_blocks = checked_storage("MLXBackend", self.capabilities, spec, num_blocks, by)
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self._metal_kernel = metal_kernel
        self._storage = None if storage is None else checked_rows("MLXBackend", spec, self.num_blocks, storage)
        self._allocate()

    def _allocate(self) -> None:
        """Make `_pool`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<MLXBackend of {self.spec.describe(self.num_blocks)}, route={self.route!r}>"

    def asarray(self, x: np.ndarray) -> mx.array:
        """Return a copy of a float32 numpy array as an MLX array."""
        return mx.array(np.asarray(x, np.float32))

    def to_numpy(self, x: mx.array) -> np.ndarray:
        """Return a copy of an MLX array as float32 numpy."""
        return np.array(x.astype(mx.float32))

    # --------------------------------------------------------------------------------------------- memory

    @property
    def pool_copies(self) -> int:
        """Number of pool arrays that MLX has copied, as counted so far."""
        return self._pool.num_copies

    def memory(self) -> MemoryReport:
        """Return the bytes of the pool, and MLX's own counts. Does not wait."""
        return MemoryReport(
            self.num_blocks * self.spec.block_nbytes,
            mx.get_peak_memory(),
            mx.get_active_memory(),
            self.pool_copies,
        )


def has_metal() -> bool:
    """Whether MLX computes on a GPU with Metal."""
    return bool(mx.default_device() == mx.gpu and mx.metal.is_available())


def kernels_refusal() -> str | None:
    """Return why the CPU kernels cannot be used now. None: they can."""
    if mx.default_device() != mx.cpu:
        return f"MLX computes on {mx.default_device()}"
    try:
        import kvpool_backends.cpu._kernels  # noqa: F401
    except ImportError as error:
        return f"the CPU kernels cannot be imported ({error})"
    return None
