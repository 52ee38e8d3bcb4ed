"""Pools of the kinds whose hits are of any length: what a test of `make_any` says holds for both."""

from functools import partial

import pytest

from kvpool import Group

GROUPS = {"one table": None, "full": [Group.full()]}


@pytest.fixture(params=GROUPS)
def groups(request):
    """The layer groups of a pool, or None."""
    return GROUPS[request.param]


@pytest.fixture
def make_any(make_pool, groups):
    """As `make_pool`, for a pool of each kind with a prefix cache."""
    return partial(make_pool, prefix_cache=True, groups=groups)
