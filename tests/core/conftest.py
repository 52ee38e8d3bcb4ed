"""Pools of several kinds: what a test of `make_any` says holds for one layer group and for several."""

from functools import partial

import pytest

from kvpool import Group

GROUPS = {"full": [Group.full()], "full and window": [Group.full(), Group.window(8)]}


@pytest.fixture(params=GROUPS)
def groups(request):
    """The layer groups of a pool."""
    return GROUPS[request.param]


@pytest.fixture
def make_any(make_pool, groups):
    """As `make_pool`, for a pool of each kind."""
    return partial(make_pool, groups=groups)
