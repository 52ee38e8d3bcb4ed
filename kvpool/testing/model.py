"""`ModelPool` and `ModelPlan`: the core's contract in plain Python, slow and obviously right.

The independent oracle of `kvpool.Pool` and `kvpool.Plan`: it follows ``docs/core.md`` and
``docs/prefix.md`` line by line and shares no code with the core. Reference counts are recounted from the tables and the
pending steps whenever they are needed; there are only lists and dicts, and plans are rebuilt from scratch by each step.
One difference to the core: `digest` and `fingerprint` are other hash functions.

Examples
--------
>>> from kvpool.testing.model import ModelPlan, ModelPool
>>> pool = ModelPool(num_blocks=8, block_size=4)
>>> plan = ModelPlan(pool, max_rows=2, max_tokens=8)
>>> seq = pool.open()
>>> pool.step(plan, [seq], 5)
>>> plan.slot_mapping.tolist()
[4, 5, 6, 7, 8]
>>> pool.done(plan)
"""

from __future__ import annotations

from kvpool.testing.model_plan import ModelPlan
from kvpool.testing.model_prefix import CacheModel

__all__ = ["ModelPlan", "ModelPool"]


class ModelPool(CacheModel):
    """A pool of KV blocks in plain Python; same constructor, methods and errors as `kvpool.Pool`.

    See `kvpool.testing.model_groups.PoolModel` for the parameters.
    """
