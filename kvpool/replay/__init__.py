"""Replay of serving traces through a pool: how many blocks a workload needs, and what a prefix cache gives it.

`read_trace` or `synthetic_trace` gives a `Trace`, `replay` runs it through the public calls of `kvpool.Pool`. The
command is ``kvpool replay``. `save` writes the calls that a pool recorded (``Pool(record=N)``) to a file, which
``kvpool replay --ops FILE`` makes again; `load` reads it. Not imported with kvpool.
"""

from kvpool.replay.calls import load, save
from kvpool.replay.loop import Occupancy, Result
from kvpool.replay.policies import replay
from kvpool.replay.readers import TraceError, read_trace
from kvpool.replay.synthetic import synthetic_trace
from kvpool.replay.trace import Trace

__all__ = ["Occupancy", "Result", "Trace", "TraceError", "load", "read_trace", "replay", "save", "synthetic_trace"]
