"""Pools whose hits are of any length: what a test of `make_any` says holds for one full group and for several."""

import pytest

from kvpool import Group

GROUPS = {
    "full": lambda num_blocks: [Group.full()],
    "two full": lambda num_blocks: [Group.full(), Group.full(arena=1, num_blocks=num_blocks)],
}


@pytest.fixture(params=GROUPS)
def groups_of(request):
    """The layer groups of a pool of so many blocks; each has an arena of its own."""
    return GROUPS[request.param]


@pytest.fixture
def make_any(make_pool, groups_of):
    """As `make_pool`, for a pool of each kind with a prefix cache."""

    def make(num_blocks=16, block_size=4, **options):
        return make_pool(num_blocks, block_size, prefix_cache=True, groups=groups_of(num_blocks), **options)

    return make
