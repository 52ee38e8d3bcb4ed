"""Which tokens of a sequence stay when there is no room for all.

`H2O` and `BlockEviction` are policies, `advise` suggests a budget, `Memory` holds what a policy has
seen of a batch of sequences and makes its choice, `Evictor` carries it out: by `kvpool.Pool.compact` and
`evict_blocks`, and the backend's `KVBackend.compact`. `kvpool.Scheduler` takes one, ``kvpool.adapters.mlx_lm`` makes
them. `SlidingWindow` needs none of these: it is a layer group of the pool.

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
