"""Every store passes the public kit, and the kit catches planted faults."""

import numpy as np
import pytest

from kvpool.store import Blocks, DiskStore, MemoryStore, TieredStore
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


class Faulty(MemoryStore):
    """A store in memory whose names are changed on the way in and out, or whose answers are."""

    def __init__(self, layout, forget=(), **faults):
        super().__init__(layout, 1 << 20)
        self.forget, self.faults = forget, faults

    def seen(self, blocks):
        if not isinstance(blocks, Blocks):
            return blocks
        parts = {name: getattr(blocks, name) for name in ("keys", "parents", "tokens", "namespace", "group")}
        for name in self.forget:
            parts[name] = np.zeros_like(parts[name])
        return Blocks(**parts)

    def lookup(self, blocks):
        return super().lookup(self.seen(blocks))

    def load(self, blocks, rows):
        loaded = super().load(self.seen(blocks), rows)
        if self.faults.get("byte") and loaded.any():
            rows[int(np.argmax(loaded))][-1] ^= 1
        return loaded

    def store(self, blocks, rows):

        if self.faults.get("unchecked"):
            return len(blocks)
        return super().store(self.seen(blocks), rows)

    def close(self):
        if not self.faults.get("open"):
            super().close()


FAULTS = {
    "parents": (("parents",), {}, "a_key_alone_proves_nothing"),
    "byte": ((), {"byte": True}, "a_random_program_has_no_wrong_hit"),
    "unchecked": ((), {"unchecked": True}, "a_wrong_argument_raises_and_changes_nothing"),
    "open": ((), {"open": True}, "a_closed_store_has_nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught_by_its_case(fault):
    forget, faults, name = FAULTS[fault]
    (case,) = [case for case in kit.CASES if case.__name__ == name]
    with pytest.raises(AssertionError, match="1 of 1 cases failed"):
        kit.check_store(lambda layout, place: Faulty(layout, forget, **faults), shared=False, cases=[case])


def test_faulty_store_without_a_fault_passes_the_kit():
    outcome = kit.check_store(lambda layout, place: Faulty(layout), shared=False)
    assert set(outcome.values()) == {"passed", "not applicable"}
