"""Replay of serving traces through a pool: how many blocks a workload needs, and what a prefix cache gives it.

`read_trace` or `synthetic_trace` gives a `Trace`, `replay` runs it through the public calls of `kvpool.Pool`. The
command is ``kvpool replay``. Not imported with kvpool.
"""

from kvpool.replay.loop import Occupancy, Result
from kvpool.replay.policies import replay
from kvpool.replay.readers import TraceError, read_trace
from kvpool.replay.trace import Trace, synthetic_trace

__all__ = ["Occupancy", "Result", "Trace", "TraceError", "read_trace", "replay", "synthetic_trace"]
