"""An optional extension that writes into MLX's pool as a node of MLX's own graph.

MLX's operations give every array that they change a new value, and that is a copy of the whole pool whenever a read
of the step before is still in flight. The extension adds the one operation that MLX lacks: a node whose output is
the memory of its input. With it a step stays lazy, steps may be pipelined, and the pool is never copied.

It talks to MLX's C++ interface, which changes from one patch release to the next. So it is compiled where it is
used, against the very MLX that is installed there (``python -m kvpool_backends.mlx.native build``, a C++20 compiler
and some seconds), and used only where its stamp fits and its self-check passes (`loading`). Without it everything
works as before.

- `loading`: find, check and import what was built; `status` says what there is and why not.
- `build`: compile it.
- `pool`: `InPlacePool`, the one owner of a pool's arrays and of the order of what happens to them.
- `backend`: `NativeBackend`, the mlx backend with lazy calls of the CPU kernels.
- `*.h`, `*.cpp`: the extension.
"""

from kvpool_backends.mlx.native.loading import load, status

__all__ = ["load", "status"]
