"""The public test kit: it compares the core, and any backend, with independent implementations.

- `ModelPool`, `ModelPlan` (`kvpool.testing.model`): the core's contract in plain Python.
- `kvpool.testing.conformance`: what every backend has to pass.
- `check_store` (`kvpool.testing.stores`): what every store of blocks has to pass.
"""

from kvpool.testing.model import ModelPlan, ModelPool
from kvpool.testing.stores import check_store

__all__ = ["ModelPlan", "ModelPool", "check_store"]
