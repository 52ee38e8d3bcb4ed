"""The mlx backend: MLX owns the pool's memory. `MLXBackend` makes a backend of the route that fits.

Routes are the modules `metal` and `cuda` for GPUs, `cpu_kernels` where MLX computes on the CPU, and `plain` for every
device. Where the extension was built (`native`), those for Metal and the CPU write in place, lazily.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvpool.errors import BackendUnavailable, install_command
from kvpool.protocol import StepArrays
from kvpool.spec import KVSpec

try:  # `import mlx` alone proves nothing: without its native library it is an empty namespace package
    import mlx.core as mx
except ImportError as error:
    raise BackendUnavailable(
        f"[mlx backend] mlx.core cannot be imported ({error}); install it with `{install_command('mlx')}` "
        "(on Linux the package is mlx[cpu], the bare mlx package does not import there)"
    ) from error

from kvpool_backends.mlx.base import BaseBackend, has_cuda, has_metal, kernels_refusal
from kvpool_backends.mlx.native import MLX_VERSION, status

if TYPE_CHECKING:
    from kvpool_backends.mlx.metal_kernels import Factory

TESTED_SERIES = "0.32."

_log = logging.getLogger(__name__)

__all__ = ["BaseBackend", "MLXBackend", "kernels_refusal"]


class _Maker:
    """The class of `MLXBackend`."""

    def __call__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        storage: np.ndarray | None = None,
        kernels: bool | None = None,
        native: bool | None = None,
        metal_kernel: Factory | None = None,
    ) -> BaseBackend:
        """KV storage in MLX's memory: a `MetalBackend`, a `KernelBackend` or a `PlainBackend`.

        Parameters
        ----------
        spec : KVSpec
            Any dtype; any layout by the kernel route, "NHD" by the plain one. The extension does not have "block".
        num_blocks : int
            Blocks of every layer, allocated here, never grown.
        storage : uint8 ``[num_blocks, spec.block_nbytes]``, optional
            Memory to use instead, see `KVBackend`; only with layout "block", which only the kernel route has: MLX's own
            arrays are not views that it could write to.
        kernels : bool, optional
            Whether to use kernels, of Metal or of the CPU. By default they are used if they support this device and,
            with Metal, this spec.
        native : bool, optional
            Whether to use the extension that writes in place (`kvpool_backends.mlx.native`). By default it is used if
            it was built here and fits. On the CPU its calls are lazy. With Metal they never copy the pool.
        metal_kernel : callable, optional
            Take the Metal route with kernels of this factory, which has the interface of ``mx.fast.metal_kernel``. For
            tests without Metal.

        Raises
        ------
        ValueError
            What `capabilities` refuses, or `num_blocks` < 1.
        BackendUnavailable
            `kernels` or `native` is True and there are none here. MLX is of another series than `TESTED_SERIES`, and
            the route gives wrong results on it.
        """
        route: Any = _choose(spec, kernels, native, metal_kernel)
        is_tested = MLX_VERSION.startswith(TESTED_SERIES)
        if not is_tested or (route.route in ("metal", "cuda") and metal_kernel is None):
            found = what_is_wrong(route, metal_kernel, _smallest(spec))
            if found and not is_tested:
                raise BackendUnavailable(
                    f"[MLXBackend] MLX {MLX_VERSION} is installed, the {route.route} route was tested with "
                    f"{TESTED_SERIES}x and does not work with it ({found}); install mlx {TESTED_SERIES}x"
                )
            if found:
                if kernels or native:
                    raise BackendUnavailable(f"[MLXBackend] the kernels do not work on this GPU ({found})")
                route = _route("plain")
        made: BaseBackend = route(spec, num_blocks, storage=storage, metal_kernel=metal_kernel)
        return made

    @staticmethod
    def device_info() -> dict[str, Any]:
        """Return MLX's description of the machine, for ``kvpool.config.blocks_for``."""
        if not mx.metal.is_available():
            return {}
        return {**mx.device_info(), "active_nbytes": mx.get_active_memory()}


MLXBackend = _Maker()


def _smallest(spec: KVSpec) -> KVSpec:
    """A spec for the self-check that takes the same kernels."""
    heads = 1 if spec.latent else 2
    return replace(spec, num_layers=1, num_kv_heads=heads, block_size=8, layout="NHD")


@cache
def what_is_wrong(route: Any, metal_kernel: Any, spec: KVSpec) -> str:
    """Write and attend as the numpy backend does; return what is wrong, "" if nothing. Says so in the log, once."""
    is_tested = MLX_VERSION.startswith(TESTED_SERIES)
    found = _difference(route, metal_kernel, spec)
    if found and route.route == "metal":
        from kvpool_backends.mlx.metal_kernels import MetalKernels

        # What most probably is refused, and what takes its place.
        for owner, name, what in (
            (MetalKernels, "widen", "products of matrices of floats alone are taken"),
            (route, "describes_each", "attention is described to MLX for each layer"),
        ):
            if not found or not hasattr(owner, name):
                continue
            setattr(owner, name, True)
            works = not _difference(route, metal_kernel, spec)
            setattr(owner, name, works)
            if works:
                _log.warning("[mlx] %s, because of: %s", what, found)
                found = ""
    if found and is_tested:
        _log.warning("[mlx] the kernels do not work on this GPU, the plain route is taken: %s", found)
    elif not found and not is_tested:
        _log.warning(
            "[mlx] MLX %s is untested, the %s route has passed its self-check with it", MLX_VERSION, route.route
        )
    return found


def _difference(route: Any, metal_kernel: Any, spec: KVSpec) -> str:
    from kvpool_backends.numpy import NumpyBackend

    slots = np.r_[8:21, 24:40]  # 13 tokens, and 16
    plan = StepArrays(np.array([[1, 2], [3, 4]]), np.array([13, 16]), np.array([0, 1, 4]), slots)
    rng, heads = np.random.default_rng(0), spec.num_kv_heads
    k, v = (rng.standard_normal((len(slots), heads, dim)).astype(np.float32) for _, dim in spec.planes)
    q = rng.standard_normal((4, 4 * heads, spec.query_dim)).astype(np.float32)
    try:
        outs = []
        backend: Any
        for backend in (NumpyBackend(spec, 5), route(spec, 5, metal_kernel=metal_kernel)):
            step = backend.prepare(plan)
            backend.write(step, 0, backend.asarray(k), backend.asarray(v))
            outs.append(backend.to_numpy(backend.attend(step, 0, backend.asarray(q))))
    except BackendUnavailable:  # the release of MLX is not the cause
        raise
    except Exception as exc:  # whatever another MLX makes of calls that it does not have, or a compiler of a kernel
        return f"{type(exc).__name__}: {exc}"
    error = float(np.abs(outs[0] - outs[1]).max())
    return "" if error < (1e-4 if spec.dtype == "float32" else 2e-2) else f"attention is wrong by {error:.2g}"


def _choose(
    spec: KVSpec, kernels: bool | None, native: bool | None, metal_kernel: Factory | None
) -> type[BaseBackend]:
    """Return the class of the route to take. Import no other route."""
    from kvpool_backends.mlx.native import load

    def with_native(route: str) -> str:
        takes = spec.layout != "block" and (native or (native is None and load() is not None))
        return f"native {route}" if takes else route

    refusal: str | None = "kernels=False"
    if kernels is not False and native and spec.layout == "block":
        refusal = "the extension does not have layout 'block'"
    elif kernels is not False and (metal_kernel is not None or has_metal() or has_cuda()):
        from kvpool_backends.mlx.metal_kernels import latent_refusal

        route = _route(with_native("metal") if metal_kernel is not None or has_metal() else "cuda")
        refusal = None if metal_kernel is not None else route.capabilities.refusal(spec) or latent_refusal(spec)
        if refusal is None:
            return route
    elif kernels is not False:
        refusal = kernels_refusal()
        if refusal is None:
            return _route(with_native("kernels"))
    if kernels or native:
        raise BackendUnavailable(f"[MLXBackend] {'kernels' if kernels else 'native'}=True, but {refusal}")
    return _route("plain")


_ROUTES = {
    "plain": "plain:PlainBackend",
    "cuda": "cuda:CudaBackend",
    "metal": "metal:MetalBackend",
    "native metal": "native.backend:NativeMetalBackend",
    "kernels": "cpu_kernels:KernelBackend",
    "native kernels": "native.backend:NativeBackend",
}


def _route(name: str) -> type[BaseBackend]:
    module, _, route = _ROUTES[name].partition(":")
    if name == "metal":
        _say_what_scatters_cost()
    return cast(type[BaseBackend], getattr(import_module(f"{__name__}.{module}"), route))


@cache
def _say_what_scatters_cost() -> None:
    if has_metal() and not (found := status())["active"]:
        _log.warning(
            "[mlx] writes are scatters of MLX: a step is given to the GPU when the one before has finished; the "
            "extension writes in place, and steps queue up (%s): %s",
            found["why"],
            found["command"],
        )
