"""Every wrong argument of `BlockStore`: which exception, that it names the call, and that no byte changed.

The legal arguments of `Given` are changed one by one: by rules that hold for every array, and by values of their own.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions
from kvpool_backends.cpu import BlockStore, CPUBackend, num_threads, read_sum, set_num_threads

HEADS, DIM, V_DIM, SIZE, BLOCKS, LAYERS = 2, 8, 4, 4, 6, 2
SPEC = KVSpec(LAYERS, HEADS, DIM, "float32", SIZE, V_DIM)
OUTPUTS = ("out", "scores_out", "k_out", "v_out")


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def noise(shapes):
    return [np.random.default_rng(1).random(shape).astype(np.float32) for shape in shapes]


def ints(*numbers):
    return np.array(numbers, np.int32)


def read_only(x):
    x.flags.writeable = False
    return x


def misaligned(*shape, dtype=np.float32):
    raw = np.zeros(np.prod(shape) * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


def odd_stride(*shape, dtype=np.float32):
    """Elements that are no whole number of elements apart, as fields of a record are."""
    return np.zeros(shape, np.dtype([("x", dtype), ("y", np.uint8)]))["x"]


class NoBuffer:
    """Looks like an array to whoever asks for attributes."""

    shape, ndim, dtype = (3, HEADS, DIM), 3, np.dtype(np.float32)


@dataclass
class Given:
    """Legal arguments of every call: two rows of 2 and 1 queries in contexts of 5 and 9 tokens."""

    arrays: list[np.ndarray] = field(default_factory=lambda: noise([shape for shape, _, _ in SPEC.base_arrays(BLOCKS)]))
    store: Any = None
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        self.store = BlockStore(SPEC, BLOCKS, self.arrays)
        self.arguments = {
            "write": {"layer": 0, "k": ones(3, HEADS, DIM), "v": ones(3, HEADS, V_DIM), "slots": ints(1, -1, 23)},
            "attend": {
                "layer": 1,
                "q": ones(3, 4, DIM),
                "out": np.full((3, 4, V_DIM), 7, np.float32),
                "block_tables": ints([1, 2, -1], [3, 4, 5]),
                "seq_lens": ints(5, 9),
                "cu_q_lens": ints(0, 2, 3),
                "scores": "raw",
                "scores_out": np.full((2, HEADS, 9), 7, np.float32),
            },
            "copy_blocks": {"copies": ints([1, 2, 3], [3, 4, 1])},
            "gather": {
                "layer": 0,
                "blocks": ints(1, 3),
                "k_out": np.full((5, HEADS, DIM), 7, np.float32),
                "v_out": np.full((5, HEADS, V_DIM), 7, np.float32),
            },
            "compact": {"blocks": ints(1, 3), "keep": np.tile([1, 2, 6], (LAYERS * HEADS, 1))},
            "zero": {"blocks": ints(1, 3)},
            "export_blocks": {"blocks": ints(1, 3), "out": np.full((2, SPEC.block_nbytes), 7, np.uint8)},
            "import_blocks": {"blocks": ints(1, 3), "data": np.zeros((2, SPEC.block_nbytes), np.uint8)},
        }


WRONG_TYPES = {
    "f": (np.float64, np.int16, ">f4", object),
    "i": (np.float32, np.uint32, bool, ">i4", object),
    "u": (np.int8, bool, np.uint16, np.float32, np.int32),
}
#: What may be larger (1) or smaller (-1) than in `Given`: (argument, axis, by how much).
FREE = {
    *(("block_tables", 0, 1), ("block_tables", 1, 1)),
    *(("scores_out", 0, 1), ("scores_out", 2, 1)),
    *(("blocks", 0, 1), ("blocks", 0, -1), ("keep", 1, 1), ("keep", 1, -1), ("copies", 0, 1), ("copies", 0, -1)),
}


def cases():
    """(call, argument, value, exception)"""
    for call, arguments in Given().arguments.items():
        for name, value in arguments.items():
            if isinstance(value, np.ndarray):
                yield from ((call, name, wrong, error) for wrong, error in array_cases(name, value))
            elif name == "layer":
                yield from ((call, name, layer, IndexError) for layer in (-1, LAYERS, 2**31, 2**63, 2**200, -(2**63)))
                yield from ((call, name, layer, TypeError) for layer in (True, 0.0, "0", None, [0], np.float32(0)))
    yield from id_cases()
    yield from value_cases()
    yield from option_cases()
    yield from score_cases()


def array_cases(name, value):
    """What is wrong in the place of any array."""
    for wrong in (NoBuffer(), None, [[[1.0]]], 1):
        yield wrong, ValueError if name == "scores_out" and wrong is None else TypeError
    for dtype in WRONG_TYPES[value.dtype.kind]:
        yield value.astype(dtype), TypeError
    yield b"bytes", (TypeError, ValueError)
    yield value[None], ValueError
    yield value.ravel()[0], ValueError
    for axis, size in enumerate(value.shape):
        for more in (1, -1):
            if (name, axis, more) not in FREE:
                yield np.zeros((*value.shape[:axis], size + more, *value.shape[axis + 1 :]), value.dtype), ValueError
    if value.itemsize > 1:
        yield misaligned(*value.shape, dtype=value.dtype), ValueError
        yield odd_stride(*value.shape, dtype=value.dtype), ValueError
    elif value.ndim == 2:
        yield np.zeros((len(value), 2 * value.shape[1]), np.uint8)[:, ::2], ValueError
        yield np.zeros((2 * len(value), value.shape[1]), np.uint8)[::2], ValueError
    if name in OUTPUTS:
        yield read_only(np.zeros(value.shape, value.dtype)), ValueError
    if name in OUTPUTS and value.itemsize > 1:
        for strides in ((0, 64, 4), (128, 0, 4), (128, 64, 0), (128, 4, 4), (12, 64, 4)):  # elements that overlap
            yield np.lib.stride_tricks.as_strided(np.zeros(999, np.float32), value.shape, strides), ValueError


def id_cases():
    """Ids outside the pool, in every call that takes them, and lists that do not fit."""
    for call in ("zero", "gather", "compact", "export_blocks", "import_blocks"):
        for bad in (-1, BLOCKS, 2**31 - 1, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63)):
            yield call, "blocks", np.array([1, bad]), IndexError
            yield call, "blocks", np.array([bad, 1]), IndexError
    for call in ("gather", "export_blocks", "import_blocks"):
        yield call, "blocks", ints(1), ValueError  # of a gather: 4 tokens where 5 are wanted
    for call in ("export_blocks", "import_blocks"):
        yield call, "blocks", ints(1, 3, 5), ValueError
    for call in ("compact", "import_blocks"):
        yield call, "blocks", ints(3, 3), ValueError
    for places in ([3, 3], [3, 2], [0, 2 * SIZE], [-1, 2], [2**40]):
        yield "compact", "keep", np.tile(places, (LAYERS * HEADS, 1)), ValueError
    for name, shape in (("k_out", (5, HEADS, DIM)), ("v_out", (5, HEADS, V_DIM))):
        for dtype in (np.float16, np.uint16):
            yield "gather", name, np.zeros(shape, dtype), TypeError
    for src, dst, n, error in (
        (BLOCKS, 1, 1, IndexError), (1, BLOCKS, 1, IndexError), (-1, 1, 1, IndexError), (1, -1, 1, IndexError),
        (2**31 - 1, 1, 1, IndexError), (1, 2, 0, ValueError), (1, 2, -1, ValueError), (1, 2, SIZE + 1, ValueError),
        (1, 1, 1, ValueError), (5, 0, 1, ValueError), (0, 3, 1, ValueError),
    ):  # fmt: skip
        yield "copy_blocks", "copies", ints([3, 0, 1], [src, dst, n]), error
        yield "copy_blocks", "copies", np.array([[3, 0, 1], [src, dst, n]]), error


def value_cases():
    limit = BLOCKS * SIZE
    for bad in (limit, limit + 1, 2**31 - 1, 2**63 - 1):
        yield "write", "slots", np.array([1, bad, 2]), IndexError
    for bad in (-1, BLOCKS, 2**31 - 1, -(2**31)):
        for row, column, dtype in ((0, 0, np.int32), (0, 1, np.int64), (1, 0, np.int64), (1, 2, np.int32)):
            tables = ints([1, 2, -1], [3, 4, 5]).astype(dtype)
            tables[row, column] = bad
            yield "attend", "block_tables", tables, IndexError
    for bad in (2**32 + 1, -(2**63), 2**63 - 1):
        yield "attend", "block_tables", np.array([[1, 2, -1], [3, 4, bad]]), IndexError
    for lens in ((1, 9), (5, 0), (5, -1), (-5, 9), (13, 9), (5, 13), (5, 2**31 - 1), (-(2**63), 9)):
        yield "attend", "seq_lens", np.array(lens), ValueError
    for sums in ((1, 2, 3), (-1, 2, 3), (0, 2, 1), (0, 2, 4), (0, 6, 6), (0, -1, 3), (0, 3, 2), (0, -(2**63), 3)):
        yield "attend", "cu_q_lens", np.array(sums), ValueError
    for scale in (float("nan"), float("inf"), -float("inf"), 1e39, -1e300, 10**400, np.float64("nan")):
        yield "attend", "scale", scale, ValueError
    for scale in ("1.0", True, [1.0], 1j, b"1"):
        yield "attend", "scale", scale, TypeError


def option_cases():
    """Their numbers are checked where options are made."""
    for given in (1, {}, "options", [], SimpleNamespace(window=1), object()):
        yield "attend", "options", given, TypeError
    for shape in ((3, 8), (2, 9), (4, 9), (3, 2, 9), (3, 5, 9), (3, 4, 8), (3, 1, 8), (2, 4, 9)):
        for dtype in (np.float32, bool):
            yield "attend", "options", AttentionOptions(mask=ones(*shape, dtype=dtype)), ValueError
    yield "attend", "options", AttentionOptions(mask=misaligned(3, 9)), ValueError
    for name in ("sinks", "alibi_slopes"):
        for count in (3, 5, 0, 1):
            yield "attend", "options", AttentionOptions(**{name: ones(count)}), ValueError


def score_cases():
    for kind, error in (("entropy", ValueError), ("", ValueError), ("RAW", ValueError), (None, ValueError),
                        (True, TypeError), (1, TypeError), (b"raw", TypeError), (["raw"], TypeError)):  # fmt: skip
        yield "attend", "scores", kind, error
    yield "attend", "scores_out", ones(2, HEADS, 18)[..., ::2], ValueError
    yield "attend", "scores_out", ones(2, HEADS, 9)[..., ::-1], ValueError


def changes_nothing(call, name, value, error):
    given = Given()
    before = [array.tobytes() for array in given.arrays]
    arguments = given.arguments[call] | {name: value}
    outputs = {key: x.tobytes() for key, x in given.arguments[call].items() if key.endswith("out")}
    with pytest.raises(error) as caught:
        getattr(given.store, call)(**arguments)
    message = str(caught.value)
    assert message.startswith(f"[{call}] "), message
    assert len(message) < 400
    assert [array.tobytes() for array in given.arrays] == before
    assert {key: given.arguments[call][key].tobytes() for key in outputs} == outputs


CASES = defaultdict(list)
for case in cases():
    CASES[case[:2]].append(case)


@pytest.mark.parametrize("argument", CASES, ids=" ".join)
def test_wrong_argument_is_refused_and_nothing_changes(argument):
    for case in CASES[argument]:
        changes_nothing(*case)


def test_legal_arguments_are_accepted():
    """The cases above change one argument of calls that work."""
    given = Given()
    for call, arguments in given.arguments.items():
        getattr(given.store, call)(**arguments)
    given.store.attend(**given.arguments["attend"], scale=0.5, options=AttentionOptions())


# ---------------------------------------------------------------------- memory that overlaps


def refused_overlap(store, call, arguments, arrays, names):
    before = [array.tobytes() for array in arrays]
    with pytest.raises(ValueError, match=rf"^\[{call}\] .*must not overlap with") as caught:
        getattr(store, call)(**arguments)
    assert any(name in str(caught.value) for name in names)
    assert [array.tobytes() for array in arrays] == before


@pytest.mark.parametrize("layer", range(LAYERS))
def test_tokens_inside_the_pool_are_refused(layer):
    """Also those of another layer than the one that is written or read."""
    given = Given()
    inside_k = given.arrays[2 * layer].reshape(-1, HEADS, DIM)
    inside_v = given.arrays[2 * layer + 1].reshape(-1, HEADS, V_DIM)
    plan = {"write": {"k": inside_k[5:8], "v": inside_v[::-1][:3]},
            "gather": {"k_out": inside_k[5:10], "v_out": inside_v[:5]},
            "attend": {"out": given.arrays[2 * layer + 1].reshape(-1)[:48].reshape(3, 4, V_DIM),
                       "q": given.arrays[2 * layer].reshape(-1)[:96].reshape(3, 4, DIM)}}  # fmt: skip
    for call, inputs in plan.items():
        for name, value in inputs.items():
            refused_overlap(given.store, call, given.arguments[call] | {name: value}, given.arrays, [name])
    rows = given.arrays[2 * layer].view(np.uint8).reshape(-1)[: SPEC.block_nbytes].reshape(1, -1)
    for call, name in (("export_blocks", "out"), ("import_blocks", "data")):
        refused_overlap(given.store, call, {"blocks": ints(1), name: rows}, given.arrays, [name])


def test_results_that_overlap_with_inputs_are_refused():
    given = Given()
    arguments = given.arguments["attend"]
    memory = np.zeros(400, np.float32)
    q, out = memory[:96].reshape(3, 4, DIM), memory[95:143].reshape(3, 4, V_DIM)
    refused_overlap(given.store, "attend", arguments | {"q": q, "out": out}, [memory], ["out"])
    tables = memory[:6].view(np.int32).reshape(2, 3)
    tables[...] = arguments["block_tables"]
    wanted = arguments | {"block_tables": tables, "out": memory[5:53].reshape(3, 4, V_DIM)}
    refused_overlap(given.store, "attend", wanted, [memory], ["out"])
    mask = AttentionOptions(mask=memory[:27].reshape(3, 9))
    wanted = arguments | {"options": mask, "out": memory[20:68].reshape(3, 4, V_DIM)}
    refused_overlap(given.store, "attend", wanted, [memory], ["out"])
    k_out, v_out = memory[:80].reshape(5, HEADS, DIM), memory[79:119].reshape(5, HEADS, V_DIM)
    wanted = given.arguments["gather"] | {"k_out": k_out, "v_out": v_out}
    refused_overlap(given.store, "gather", wanted, [memory], ["k_out"])


# ---------------------------------------------------------------------- what makes a store, and the module


def arrays_of(spec=SPEC, num_blocks=BLOCKS):
    return [np.zeros(shape, np.float32) for shape, _, _ in spec.base_arrays(num_blocks)]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"spec": None}, TypeError),
        ({"spec": {"num_layers": 2}}, TypeError),
        *[({"num_blocks": n}, ValueError) for n in (0, -1, 2**31, 2**63, BLOCKS + 1, BLOCKS - 1)],
        *[({"num_blocks": n}, TypeError) for n in (True, 6.0, "6", None)],
        *[({"isa": name}, ValueError) for name in ("", "sse", "AVX2", "portable ")],
        *[({"isa": name}, TypeError) for name in (1, b"portable", True)],
        *[({"num_threads": n}, ValueError) for n in (0, -1, 1025, 2**40)],
        *[({"num_threads": n}, TypeError) for n in (True, 1.0, "1")],
        ({"arrays": None}, TypeError),
        ({"arrays": []}, ValueError),
        ({"arrays": arrays_of()[:-1]}, ValueError),
        ({"arrays": [*arrays_of(), np.zeros(3, np.float32)]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], None]}, TypeError),
        ({"arrays": [*arrays_of()[:-1], arrays_of()[-1].astype(np.float64)]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], arrays_of()[-1].view(np.uint8)]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], arrays_of()[-1][:-1]]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], arrays_of()[-1].T]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], read_only(arrays_of()[-1])]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], bytes(arrays_of()[-1])]}, ValueError),
        ({"arrays": [*arrays_of()[:-1], misaligned(BLOCKS, SIZE, HEADS, V_DIM)]}, ValueError),
        ({"arrays": arrays_of()[:2] * 2}, ValueError),
        ({"arrays": arrays_of()[::-1]}, ValueError),
    ],
)
def test_store_that_cannot_be_is_refused(change, error):
    wanted = {"spec": SPEC, "num_blocks": BLOCKS, "arrays": arrays_of(), "isa": None, "num_threads": None} | change
    spec, num_blocks, arrays = wanted.pop("spec"), wanted.pop("num_blocks"), wanted.pop("arrays")
    with pytest.raises(error, match=r"^\[BlockStore\] "):
        BlockStore(spec, num_blocks, arrays, **wanted)


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (1025, ValueError), (True, TypeError),
                                          (1.0, TypeError), (None, TypeError)])  # fmt: skip
def test_number_of_threads_that_cannot_be_is_refused(n, error):
    before = num_threads()
    set_num_threads(before + 1)
    assert num_threads() == before + 1
    set_num_threads(before)
    with pytest.raises(error, match=r"^\[set_num_threads\] n "):
        set_num_threads(n)
    if n is not None:
        with pytest.raises(error, match=r"^\[read_sum\] num_threads "):
            read_sum([], n)


@pytest.mark.parametrize(("args", "error"), [(({}, 3), TypeError), ((SPEC, 0), ValueError), ((SPEC, True), TypeError),
                                             ((SPEC, 2**60), MemoryError)])  # fmt: skip
def test_backend_that_cannot_be_is_refused(args, error):
    with pytest.raises(error, match=r"^\[(CPUBackend|BlockStore)\] "):
        CPUBackend(*args)
