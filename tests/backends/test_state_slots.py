"""`StateSlots` beside a dict of bytes, with arrays of numpy and of MLX; what it refuses."""

import numpy as np
import pytest

from kvpool.group_storage import StateSlots
from kvpool.sizing import StateArray

ARRAYS = (
    StateArray((2, 3), "float32"),
    StateArray((), "int64"),
    StateArray((5,), "bfloat16"),
    StateArray((4, 1, 2), "float16"),
    StateArray((3,), "float8_e4m3"),
    StateArray((1, 2), "int32"),
)
NUM_SLOTS = 7


@pytest.fixture(params=["numpy", "mlx.core"])
def xp(request):
    return pytest.importorskip(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_state_slots_hold_what_a_dict_of_bytes_holds(xp, seed):
    print(f"seed {seed}")
    rng, slots = np.random.default_rng(seed), StateSlots(ARRAYS, NUM_SLOTS, xp)
    assert slots.slot_nbytes == 24 + 8 + 10 + 16 + 3 + 8
    held = {slot: bytes(slots.slot_nbytes) for slot in range(NUM_SLOTS)}
    for _ in range(60):
        n = int(rng.integers(0, 4))
        one, other = rng.permutation(NUM_SLOTS)[:n], rng.integers(0, NUM_SLOTS, n)
        what = rng.choice(["import", "copy", "zero", "move"])
        if what == "import":
            data = rng.integers(0, 256, (n, slots.slot_nbytes), np.uint8)
            slots.import_slots(one, data)
            held |= {int(slot): row.tobytes() for slot, row in zip(one, data, strict=True)}
        elif what == "copy":
            slots.copy(other, one)
            held |= {int(dst): held[int(src)] for src, dst in zip(other, one, strict=True)}
        elif what == "zero":
            slots.zero(other)
            held |= {int(slot): bytes(slots.slot_nbytes) for slot in other}
        else:  # as a step does: no state is read for the last row, and the first one is not written
            arrays = slots.read([*other, -1])
            slots.write([-1, *one] if n else [-1], [x[: n + 1] for x in arrays])
            rows = [*(held[int(slot)] for slot in other), bytes(slots.slot_nbytes)]
            held |= {int(slot): rows[i + 1] for i, slot in enumerate(one)}
        found = slots.export_slots(np.arange(NUM_SLOTS))
        assert [row.tobytes() for row in found] == [held[slot] for slot in range(NUM_SLOTS)], what


REFUSED = [
    (lambda s, x: s.read([NUM_SLOTS]), IndexError, r"\[read\] slot 7 is outside the group, the limit is 7"),
    (lambda s, x: s.read([-2]), IndexError, r"\[read\] slot -2 is outside the group"),
    (lambda s, x: s.zero([-1]), IndexError, r"\[zero\] slot -1 is outside the group"),
    (lambda s, x: s.zero([0.5]), TypeError, r"\[zero\] slot ids must be integers, got float64"),
    (lambda s, x: s.zero([[1]]), ValueError, r"\[zero\] slots must have shape \[n\], got \[1, 1\]"),
    (lambda s, x: s.copy([1, 2], [3, 3]), ValueError, r"\[copy\] a slot is named twice in \[3, 3\]"),
    (lambda s, x: s.copy([1, 2], [3]), ValueError, r"\[copy\] there are 2 src and 1 dst"),
    (lambda s, x: s.write([1, 1], x), ValueError, r"\[write\] a slot is named twice"),
    (lambda s, x: s.write([1, 2], x[1:]), ValueError, r"\[write\] there are 5 arrays, a state has 6"),
    (lambda s, x: s.write([1, 2], [*x[:-1], x[0]]), TypeError, r"\[write\] arrays\[5\] is .*float32, the state has "),
    (lambda s, x: s.write([1, 2], [*x[:-1], [0]]), TypeError, r"\[write\] arrays\[5\] is list"),
    (lambda s, x: s.write([1], x), ValueError, r"\[write\] arrays\[0\] must have shape \[1, 2, 3\], got \[2, 2, 3\]"),
    (lambda s, x: s.import_slots([1], np.zeros((1, 69), np.int8)), TypeError, r"\[import_slots\] data must be uint8"),
    (lambda s, x: s.import_slots([1], np.zeros((1, 2), np.uint8)), ValueError, r"must have shape \[1, 69\], got"),
    (lambda s, x: s.import_slots([1, 1], np.zeros((2, 69), np.uint8)), ValueError, r"\[import_slots\] a slot is named"),
    (lambda s, x: s.export_slots([9]), IndexError, r"\[export_slots\] slot 9 is outside the group"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_wrong_argument_is_refused_before_a_byte_changes(xp, number):
    call, error, message = REFUSED[number]
    slots = StateSlots(ARRAYS, NUM_SLOTS, xp)
    data = np.random.default_rng(0).integers(0, 256, (NUM_SLOTS, slots.slot_nbytes), np.uint8)
    slots.import_slots(np.arange(NUM_SLOTS), data)
    with pytest.raises(error, match=message):
        call(slots, slots.read([1, 2]))
    assert np.array_equal(slots.export_slots(np.arange(NUM_SLOTS)), data)


@pytest.mark.parametrize(
    ("arrays", "num_slots", "error", "message"),
    [
        (ARRAYS, 0, ValueError, r"\[StateSlots\] num_slots is 0"),
        ([(2, "float32")], 1, TypeError, r"\[StateSlots\] arrays\[0\] must be a StateArray, got tuple"),
        ([StateArray((2, 0), "float32")], 1, ValueError, r"\[StateSlots\] arrays\[0\] has shape \[2, 0\]"),
    ],
)
def test_wrong_slots_are_refused(arrays, num_slots, error, message):
    with pytest.raises(error, match=message):
        StateSlots(arrays, num_slots)
