"""Fixtures of the catalogue: `make_pool`, `make_plan` and `parts` give what the subject is made of."""

import contextlib

import pytest
from catalogue import CONVICTIONS, KVPOOL, parts_of

from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec
from kvpool.errors import PoolClosed
from kvpool.namespaces import namespace
from kvpool.store import DiskStore
from kvpool_backends.cpu import BlockStore
from kvpool_backends.numpy import NumpyBackend


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test of the catalogue passes on a planted bug when its body fails."""
    subject = pyfuncitem.callspec.params.get("subject") if hasattr(pyfuncitem, "callspec") else None
    if subject is None or not subject.is_faulty:
        return (yield)
    try:
        yield
    except CONVICTIONS:
        return True
    pytest.fail(f"the planted bug {subject.name} was not noticed")


@pytest.fixture
def subject(request):
    """What the test is run against."""
    return getattr(request, "param", KVPOOL)


@pytest.fixture
def parts(subject, core):
    """The parts under test by name: kvpool's own, unless the subject replaces them."""
    pool = {"Pool": core.Pool, "Plan": core.Plan, "namespace": namespace, "prelude": ""}
    storage = {"Backend": NumpyBackend, "Manager": KVBlockManager, "Spec": KVSpec, "Store": BlockStore}
    return parts_of(subject, pool | storage | {"Disk": DiskStore})


@pytest.fixture
def make_pool(subject, parts):
    """As in tests/conftest.py; what is broken on purpose is not checked at the end."""
    pools = []

    def make(num_blocks=16, block_size=4, **options):
        options.setdefault("max_seqs", 64)
        options.setdefault("seed", 1)
        pools.append(parts.Pool(num_blocks, block_size, **options))
        return pools[-1]

    yield make
    for pool in pools:
        with contextlib.suppress(PoolClosed):
            if not subject.is_faulty:
                pool.check()
        pool.shutdown()


@pytest.fixture
def make_plan(parts):
    """As in tests/conftest.py."""

    def make(pool, max_rows=8, max_tokens=64, **options):
        return parts.Plan(pool, max_rows, max_tokens, **options)

    return make
