"""Random programs on the core beside the plain model, on pools with layer groups.

::

    python -m proof.plain --seconds 60
"""

from kvpool.testing import ModelPool as plain_pool

__all__ = ["plain_pool"]
