"""Serving under an open loop: workloads, a harness with a clock, phases and latencies. Knows no framework.

Requests arrive when they arrive, whether the server keeps up or not. `serve` drives any `Server` with a `Workload` and
returns a `Record` of every tick and every token; `phases` and `metrics` say what it means. The command is
``python -m benchmarks.serving``. Not imported with kvpool.
"""

from benchmarks.serving.harness import Server, SimulatedClock, Tick, WallClock, serve, serve_side_by_side
from benchmarks.serving.phases import Phases, find_phases
from benchmarks.serving.record import Record
from benchmarks.serving.slots import SlotServer
from benchmarks.serving.static import StaticBatches
from benchmarks.serving.workload import Lengths, Workload, make_workload, trace_workload

__all__ = [
    "Lengths",
    "Phases",
    "Record",
    "Server",
    "SimulatedClock",
    "SlotServer",
    "StaticBatches",
    "Tick",
    "WallClock",
    "Workload",
    "find_phases",
    "make_workload",
    "serve",
    "serve_side_by_side",
    "trace_workload",
]
