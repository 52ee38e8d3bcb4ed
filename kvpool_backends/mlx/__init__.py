"""The MLX backend: MLX owns the pool's memory.

Where MLX computes on the CPU, the kernels of `kvpool_backends.cpu` work on that memory in place (`kernels`); on a GPU
those of `kvpool_backends.metal` attend over it (`metal`); elsewhere writes are scatters and reads are gathers for MLX's
own attention (`plain`). `MLXBackend` takes the one that fits. With an extension that is compiled where it is used,
writes become nodes of MLX's graph that never copy the pool (`native`).
"""

from kvpool.errors import BackendUnavailable

try:  # `import mlx` alone proves nothing: without its native library it is an empty namespace package
    import mlx.core as _mx  # noqa: F401
except ImportError as error:
    raise BackendUnavailable(
        f"[mlx backend] mlx.core cannot be imported ({error}); install it with `pip install 'kvpool[mlx]'` "
        "(on Linux the package is mlx[cpu], the bare mlx package does not import there)"
    ) from error

from kvpool_backends.mlx.backend import MemoryReport, MLXBackend, kernels_refusal
from kvpool_backends.mlx.upload import StepArrays, TableUploader

__all__ = ["MLXBackend", "MemoryReport", "StepArrays", "TableUploader", "kernels_refusal"]
