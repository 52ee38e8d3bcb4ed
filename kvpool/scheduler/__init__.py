"""Continuous batching over a `Pool`: which sequences compute what in the next step. docs/scheduling.md is the contract.

Integers only: no tensors, no model, no framework.
"""

from kvpool.scheduler.drafts import Decoding
from kvpool.scheduler.request import Output, Request, SchedulerStats, TenantStats, Times
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.state import Step

__all__ = ["Decoding", "Output", "Request", "Scheduler", "SchedulerStats", "Step", "TenantStats", "Times"]
