"""What the tests of stores have in common: every store is closed when its test ends."""

import pytest

from kvpool.store import DiskStore, ServerStore


@pytest.fixture(autouse=True)
def every_store_is_closed(monkeypatch):
    made = []
    for kind in (DiskStore, ServerStore):

        def note(self, *given, init=kind.__init__, **options):
            init(self, *given, **options)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", note)
    yield
    for store in made:
        store.close()
