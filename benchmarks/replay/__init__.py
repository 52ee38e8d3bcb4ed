"""Replay of serving traces through a pool: how many blocks a workload needs, and what a prefix cache gives it.

`read_trace` or `synthetic_trace` gives a `Trace`, `replay` runs it through the public calls of `kvpool.Pool`. The
command is ``python -m benchmarks.replay``.
"""

from benchmarks.replay.policy import replay
from benchmarks.replay.readers import TraceError, read_trace
from benchmarks.replay.results import Result
from benchmarks.replay.trace import Trace, synthetic_trace

__all__ = ["Result", "Trace", "TraceError", "read_trace", "replay", "synthetic_trace"]
