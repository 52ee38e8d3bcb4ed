"""`MLXBackend`: the backend protocol on memory that MLX owns, by one of three routes.

The route is chosen when a backend is made:

- *metal* (`kvpool_backends.mlx.metal`): where MLX computes on a GPU with Metal. Attention by kernels of Metal,
  straight over the pool, all of it lazy. Layout "NHD", every layout with the native extension.

- *kernels* (`kvpool_backends.mlx.kernels`): where MLX computes on the CPU. The CPU kernels work on the pool in
  place, at once, and MLX itself never computes with it. All layouts, all options of attention. Where the extension
  was built (`kvpool_backends.mlx.native`), the same kernels run as lazy nodes of MLX's graph.
- *plain* (`kvpool_backends.mlx.plain`): on every device that MLX has. Writes are scatters, reads are gathers for
  MLX's own attention, all of it lazy. Layout "NHD".

This module has what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool.protocol import Capabilities
from kvpool_backends.mlx.storage import DTYPES, PoolMemory

if TYPE_CHECKING:
    from kvpool_backends.mlx.metal_kernels import Factory


class MemoryReport(NamedTuple):
    """Memory of the pool as counted here and as MLX saw it, in bytes."""

    pool_nbytes: int  # blocks * bytes per block
    mlx_peak_nbytes: int  # mx.get_peak_memory(): everything that the process does in MLX, not the pool alone
    mlx_active_nbytes: int  # mx.get_active_memory()
    pool_copies: int  # pool arrays that MLX was seen to copy, see `settle`; always 0 by the kernel route


class MLXBackend:
    """KV storage in MLX's memory. Implements `kvpool.protocol.KVBackend`, see there for each method.

    Calling it makes a `MetalBackend`, a `KernelBackend` or a `PlainBackend`.

    Parameters
    ----------
    spec : KVSpec
        Any dtype; any layout by the kernel route, "NHD" by the plain one.
    num_blocks : int
        Blocks of every layer, allocated here, never grown.
    kernels : bool, optional
        Take a route with kernels, those of Metal or those of the CPU, or not. By default one is taken if there is one
        for this device and, with Metal, for this spec.
    native : bool, optional
        Use the extension that writes in place (`kvpool_backends.mlx.native`), or not. By default it is used if it was
        built here and fits. On the CPU its calls are lazy, with Metal they never copy the pool.
    metal_kernel : callable, optional
        Take the Metal route with kernels built by this, which has the interface of ``mx.fast.metal_kernel``: for
        tests, where there is no Metal.

    Attributes
    ----------
    route : {"metal", "kernels", "plain"}
    is_eager : bool
        Whether every call is through when it returns. If not, a step has to be evaluated.
    is_in_place : bool
        Whether MLX can never copy the pool. If not, `settle` between two steps keeps it from that.
    dtype : mx.Dtype
        Of the stored values.

    Raises
    ------
    ValueError
        What `capabilities` refuses, or `num_blocks` < 1.
    BackendUnavailable
        `kernels` or `native` is True and there are none here.
    """

    required_formats = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens")
    route: str
    is_eager: bool
    is_in_place: bool
    _pool: PoolMemory

    def __new__(
        cls,
        spec: KVSpec,
        num_blocks: int,
        *,
        kernels: bool | None = None,
        native: bool | None = None,
        metal_kernel: Factory | None = None,
    ) -> MLXBackend:
        route = cls if cls is not MLXBackend else _choose(spec, kernels, native, metal_kernel)
        return super().__new__(route)

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        kernels: bool | None = None,
        native: bool | None = None,
        metal_kernel: Factory | None = None,
    ) -> None:
        refusal = self.capabilities().refusal(spec)
        if refusal:
            raise ValueError(f"[MLXBackend] {refusal} by the {self.route} route")
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
            raise TypeError(f"[MLXBackend] num_blocks must be an int, got {num_blocks!r}")
        if num_blocks < 1:
            raise ValueError(f"[MLXBackend] num_blocks is {num_blocks}, the least is 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self.dtype = DTYPES[spec.dtype]
        self._metal_kernel = metal_kernel
        self._allocate()

    def _allocate(self) -> None:
        """Make `_pool`."""
        raise NotImplementedError

    @staticmethod
    def capabilities() -> Capabilities:
        """What this route accepts; ask an object that was made."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<MLXBackend of {self.spec.describe(self.num_blocks)}, route={self.route!r}>"

    # ------------------------------------------------------------------------------------------- the machine

    @staticmethod
    def device_info() -> dict[str, Any]:
        """The machine, as MLX describes it; for ``kvpool.config.blocks_for``."""
        if not mx.metal.is_available():
            return {}
        return {**mx.device_info(), "active_nbytes": mx.get_active_memory()}

    def asarray(self, x: np.ndarray) -> mx.array:
        """A float32 numpy array as an MLX array (a copy)."""
        return mx.array(np.asarray(x, np.float32))

    def to_numpy(self, x: mx.array) -> np.ndarray:
        """An MLX array as float32 numpy (a copy)."""
        return np.array(x.astype(mx.float32))

    # --------------------------------------------------------------------------------------------- memory

    @property
    def pool_copies(self) -> int:
        """Pool arrays that `settle` found copied so far."""
        return self._pool.num_copies

    def memory(self) -> MemoryReport:
        """The pool's bytes as counted here, and MLX's own peak. Does not wait."""
        return MemoryReport(
            self.num_blocks * self.spec.block_nbytes,
            mx.get_peak_memory(),
            mx.get_active_memory(),
            self.pool_copies,
        )

    # -------------------------------------------------------------------------------- for the routes

    def _ids(self, call: str, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Block ids as an int array ``[n]``, checked."""
        ids = np.asarray(blocks)
        if ids.size == 0:
            return np.zeros(0, np.int64)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"[{call}] block ids must be ints, got {ids.dtype}")
        if ids.ndim != 1:
            raise ValueError(f"[{call}] block ids have shape {ids.shape}, it must be [n]")
        self._check_ids(call, ids)
        return ids

    def _check_ids(self, call: str, ids: np.ndarray) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise IndexError(f"[{call}] block ids {ids.min()} .. {ids.max()}, the pool has 0 .. {self.num_blocks - 1}")

    def _check_layer(self, call: str, layer: int) -> None:
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"[{call}] layer is {layer}, the model has 0 .. {self.spec.num_layers - 1}")

    def _query_heads(self, q: mx.array) -> int:
        """Hq of the queries of an `attend`, checked."""
        spec = self.spec
        num_heads = q.shape[1] if q.ndim == 3 else 0
        if not num_heads or num_heads % spec.num_kv_heads or q.shape[2] != spec.head_dim:
            raise ValueError(
                f"[attend] q has shape {q.shape}, it must be [T, Hq, {spec.head_dim}] with Hq a multiple of "
                f"{spec.num_kv_heads} KV heads"
            )
        return int(num_heads)

    def _used_tables(self, tables: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """`tables` up to the longest context, checked, with 0 for entries past a row's own."""
        width = -(-int(seq_lens.max(initial=0)) // self.spec.block_size)
        used = np.arange(width) < -(-seq_lens[:, None] // self.spec.block_size)
        if width > tables.shape[1]:
            raise ValueError(f"[attend] a context needs {width} blocks, the table holds {tables.shape[1]}")
        tables = np.where(used, tables[:, :width], 0)
        self._check_ids("attend", tables)
        return tables

    def _gathered_tokens(self, ids: np.ndarray, num_tokens: int | None) -> int:
        """How many tokens a `gather` of `ids` gives, checked."""
        capacity = len(ids) * self.spec.block_size
        count = capacity if num_tokens is None else num_tokens
        if not 0 <= count <= capacity:
            raise ValueError(f"[gather] num_tokens is {num_tokens}, the blocks hold 0 .. {capacity}")
        return count


def _choose(
    spec: KVSpec, kernels: bool | None, native: bool | None, metal_kernel: Factory | None
) -> type[MLXBackend]:
    """The class of the route that `MLXBackend` takes with these arguments. Imports no other."""
    from kvpool_backends.mlx.native import load

    def with_native() -> bool:
        return not spec.is_quantized and (bool(native) or (native is None and load() is not None))

    refusal: str | None = "kernels=False"
    if kernels is not False and native and spec.is_quantized:
        refusal = "the extension has no quantized storage"
    elif kernels is not False and (metal_kernel is not None or has_metal()):
        route = _metal_route(with_native())
        refusal = None if metal_kernel is not None else route.capabilities().refusal(spec)
        if refusal is None:
            return route
    elif kernels is not False:
        refusal = kernels_refusal()
        if refusal is None:
            return _cpu_route(with_native())
    if kernels or native:
        raise BackendUnavailable(f"[MLXBackend] {'kernels' if kernels else 'native'}=True, but {refusal}")
    from kvpool_backends.mlx.plain import PlainBackend

    return PlainBackend


def _metal_route(native: bool) -> type[MLXBackend]:
    if native:
        from kvpool_backends.mlx.native.metal_backend import NativeMetalBackend

        return NativeMetalBackend
    from kvpool_backends.mlx.metal import MetalBackend

    return MetalBackend


def _cpu_route(native: bool) -> type[MLXBackend]:
    if native:
        from kvpool_backends.mlx.native.backend import NativeBackend

        return NativeBackend
    from kvpool_backends.mlx.kernels import KernelBackend

    return KernelBackend


def has_metal() -> bool:
    """Whether MLX computes on a GPU with Metal."""
    return bool(mx.default_device() == mx.gpu and mx.metal.is_available())


def kernels_refusal() -> str | None:
    """Why the CPU kernels cannot be taken here and now; None when they can."""
    if mx.default_device() != mx.cpu:
        return f"MLX computes on {mx.default_device()}"
    try:
        import kvpool_backends.cpu._kernels  # noqa: F401
    except ImportError as error:
        return f"the CPU kernels cannot be imported ({error})"
    return None
