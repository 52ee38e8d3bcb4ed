"""Which tokens of a sequence stay when there is no room for all. docs/eviction.md is the page.

>>> from kvpool.eviction import H2O, advise
>>> budget = advise(4096)
>>> H2O(max_kv=budget.max_kv, heavy=budget.heavy).recent
508
"""

from kvpool.eviction.evictor import Evictor, Memory, block_sums
from kvpool.eviction.policies import H2O, BlockEviction, Budget, Policy, SlidingWindow, advise, check_backend

__all__ = [
    "H2O",
    "BlockEviction",
    "Budget",
    "Evictor",
    "Memory",
    "Policy",
    "SlidingWindow",
    "advise",
    "block_sums",
    "check_backend",
]
