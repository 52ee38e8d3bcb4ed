"""Every store passes the public kit, and the kit catches planted faults."""

import numpy as np
import pytest

from kvpool.store import DiskStore, MemoryStore, TieredStore
from kvpool.testing import stores as kit
from kvpool.testing.filled import NotApplicable


def memory(layout, place):
    return MemoryStore(layout, 1 << 20)


def disk(layout, place):
    return DiskStore(place, layout, 1 << 24, segment_nbytes=1 << 16, refresh_seconds=0.02)


def tiered(layout, place):
    return TieredStore([MemoryStore(layout, 4000), disk(layout, place)])


@pytest.mark.parametrize("case", kit.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("factory", "shared"), [(memory, False), (disk, True), (tiered, True)])
def test_store_passes_every_case_of_the_kit(factory, shared, case, tmp_path):
    try:
        case(factory, str(tmp_path / "store"), shared)
    except NotApplicable:
        assert not shared


def with_a_wrong_byte(store, blocks, rows, load=MemoryStore.load):
    loaded = load(store, blocks, rows)
    if loaded.any():
        rows[int(np.argmax(loaded))][-1] ^= 1
    return loaded


FAULTS = {  # the case that is meant for it: what is planted in the store in memory
    "a_key_alone_proves_nothing": ("_proof", lambda blocks, number: (b"", b"", b"")),
    "a_random_program_has_no_wrong_hit": ("MemoryStore.load", with_a_wrong_byte),
    "a_wrong_argument_raises_and_changes_nothing": ("checked", lambda *given, **named: None),
    "a_closed_store_has_nothing": ("MemoryStore.close", lambda store: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_by_its_case(name, monkeypatch):
    (case,) = [case for case in kit.CASES if case.__name__ == name]
    place, fault = FAULTS[name]
    monkeypatch.setattr(f"kvpool.store.tiers.{place}", fault)
    with pytest.raises(AssertionError, match="1 of 1 cases failed"):
        kit.check_store(memory, shared=False, cases=[case])
