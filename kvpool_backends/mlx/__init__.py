"""The MLX backend, first form: MLX owns the pool, writes are scatters, reads are gathers for MLX's own
attention.

It runs wherever MLX runs. Kernels that read the blocks where they lie, and a write that can never copy, are
not part of this form: `MLXBackend.settle` counts the copies that MLX made of the pool.
"""

from kvpool.errors import BackendUnavailable

try:  # `import mlx` alone proves nothing: without its native library it is an empty namespace package
    import mlx.core as _mx  # noqa: F401
except ImportError as error:
    raise BackendUnavailable(
        f"[mlx backend] mlx.core cannot be imported ({error}); install it with `pip install 'kvpool[mlx]'` "
        "(on Linux the package is mlx[cpu], the bare mlx package does not import there)"
    ) from error

from kvpool_backends.mlx.backend import MemoryReport, MLXBackend
from kvpool_backends.mlx.upload import StepArrays, TableUploader

__all__ = ["MLXBackend", "MemoryReport", "StepArrays", "TableUploader"]
