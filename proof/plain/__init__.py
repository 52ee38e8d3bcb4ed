"""Pools with layer groups in plain Python, slow and obviously right, and random programs on the core beside them.

::

    python -m proof.plain --seconds 60

`plain_pool` makes a pool as `kvpool.Pool` does. Plans of it are `kvpool.testing.ModelPlan`. The model follows
docs/groups.md and docs/prefix.md and shares no code with the core.
"""

from __future__ import annotations

from typing import Any

from kvpool.testing import ModelPool
from proof.plain.checkpoints import CheckpointModel
from proof.plain.groups import GroupModel


def plain_pool(*sizes: Any, **options: Any) -> ModelPool | GroupModel:
    """Make the plain model of ``kvpool.Pool(*sizes, **options)``, with layer groups or without."""
    if options.get("groups") is None:
        return ModelPool(*sizes, **options)
    return (CheckpointModel if options.get("prefix_cache") is True else GroupModel)(*sizes, **options)
