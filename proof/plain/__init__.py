"""The plain model by the name that recorded programs have for it."""

from kvpool.testing import ModelPool as plain_pool

__all__ = ["plain_pool"]
