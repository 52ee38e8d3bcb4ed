"""An optional extension that writes into MLX's pool as a node of MLX's own graph.

MLX's operations give every array that they change a new value, and that is a copy of the whole pool whenever a read
of the step before is still in flight. The extension adds the one operation that MLX lacks: a node whose output is
the memory of its input. With it a step stays lazy, steps may be pipelined, and the pool is never copied.

It talks to MLX's C++ interface, which changes from one patch release to the next. So it is compiled where it is
used, against the very MLX that is installed there (`__main__`), and used only where its stamp fits and its self-check
passes (`loading`). `pool` owns the arrays and the order of what happens to them.
"""

from kvpool_backends.mlx.native.loading import load, status

__all__ = ["load", "status"]
