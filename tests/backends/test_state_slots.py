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
            slots.import_slots(one, np.array(data, order=rng.choice(["C", "F"])))
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


@pytest.mark.parametrize("seed", range(3))
def test_state_slots_after_a_resize_hold_what_was_written_under_the_new_ids(xp, seed):
    print(f"seed {seed}")
    rng, slots, held, moved = np.random.default_rng(seed), StateSlots(ARRAYS, NUM_SLOTS, xp), {}, 0
    for _ in range(30):
        have, size = slots.num_slots, int(rng.integers(1, 12))
        data = rng.integers(0, 256, (have, slots.slot_nbytes), np.uint8)
        slots.import_slots(np.arange(have), data)
        count = int(rng.integers(0, max(0, min(have - size, size)) + 1))
        sources, targets = rng.permutation(np.arange(size, have))[:count], rng.permutation(size)[:count]
        moves = np.stack([sources, targets], axis=1)
        slots.resize(size, moves)
        held = dict(enumerate(data[:size])) | {int(target): data[source] for source, target in moves}
        assert slots.num_slots == size
        ids = sorted(held)
        assert np.array_equal(slots.export_slots(ids), np.stack([held[slot] for slot in ids]))
        with pytest.raises(IndexError, match=rf"the limit is {size}"):
            slots.read([size])
        moved += count
    assert moved > 5


@pytest.mark.parametrize("moves", [(), [[15, 3]]])
def test_state_slots_of_mlx_are_resized_one_array_after_the_other(moves):
    """MLX computes late: arrays that nobody has evaluated would all hold their old memory."""
    mx = pytest.importorskip("mlx.core")
    array = StateArray((1024, 64), "float32")
    slots = StateSlots([array] * 8, 16, mx)
    mx.eval(slots.read([0]))
    mx.clear_cache()
    begun = mx.get_active_memory()
    mx.reset_peak_memory()
    slots.resize(12, moves)
    assert mx.get_peak_memory() - begun <= 2.1 * 16 * array.nbytes  # an array and its copies, not eight
    assert mx.get_active_memory() - begun <= -4 * 8 * array.nbytes


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
    (lambda s, x: s.resize(0, ()), ValueError, r"\[resize\] num_blocks is 0"),
    (lambda s, x: s.resize(2.0, ()), TypeError, r"\[resize\] num_blocks must be an int"),
    (lambda s, x: s.resize(5, [6, 1]), ValueError, r"\[resize\] moves must have shape \[K, 2\], got \[2\]"),
    (lambda s, x: s.resize(5, [[4, 1]]), IndexError, r"\[resize\] source 4 is outside the blocks that leave"),
    (lambda s, x: s.resize(5, [[7, 1]]), IndexError, r"\[resize\] source 7 is outside the blocks that leave"),
    (lambda s, x: s.resize(5, [[6, 5]]), IndexError, r"\[resize\] target 5 is outside the blocks that stay"),
    (lambda s, x: s.resize(5, [[6, 1], [6, 2]]), ValueError, r"\[resize\] a source is named twice"),
    (lambda s, x: s.resize(5, [[5, 1], [6, 1]]), ValueError, r"\[resize\] a target is named twice"),
    (lambda s, x: s.resize(5, [[6.0, 1.0]]), TypeError, r"\[resize\] source ids must be integers"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_wrong_argument_is_refused_before_a_byte_changes(xp, number):
    call, error, message = REFUSED[number]
    slots = StateSlots(ARRAYS, NUM_SLOTS, xp)
    data = np.random.default_rng(0).integers(0, 256, (NUM_SLOTS, slots.slot_nbytes), np.uint8)
    slots.import_slots(np.arange(NUM_SLOTS), data)
    with pytest.raises(error, match=message):
        call(slots, slots.read([1, 2]))
    assert slots.num_slots == NUM_SLOTS
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
