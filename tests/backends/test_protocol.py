"""The backend protocol: what counts as a backend, and what capabilities refuse."""

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.protocol import FEATURES, AttentionOptions, Capabilities, KVBackend, move_rows
from kvpool_backends.numpy import NumpyBackend

SPEC = KVSpec(2, 2, 8, "float32", 4)
VERBS = (
    *("prepare", "asarray", "to_numpy", "copy_blocks", "write", "attend", "gather", "zero"),
    *("compact", "resize", "export_blocks", "import_blocks", "warmup", "read", "queued", "settle"),
)


def test_object_without_a_verb_is_no_backend():
    assert isinstance(NumpyBackend(SPEC, 3), KVBackend)
    assert {name for name in vars(KVBackend) if not name.startswith("_")} == set(VERBS)
    for missing in VERBS:
        verbs = {name: getattr(NumpyBackend, name) for name in VERBS if name != missing}
        rest = {"spec": SPEC, "num_blocks": 3, "required_formats": (), "capabilities": None}
        partial = type("Partial", (), verbs | rest)
        assert not isinstance(partial(), KVBackend) and getattr(KVBackend, missing).__doc__


@pytest.mark.parametrize(
    ("spec", "num_q_heads", "word"),
    [
        (KVSpec(1, 2, 64, "float16", 16), 8, None),
        (KVSpec(1, 2, 64, "float32", 16), 8, "dtype"),
        (KVSpec(1, 2, 64, "float16", 16, layout="HND"), 8, "layout"),
        (KVSpec(1, 2, 64, "float16", 3), 8, "block_size"),
        (KVSpec(1, 2, 80, "float16", 16), 8, "head_dim"),
        (KVSpec(1, 2, 64, "float16", 16, v_head_dim=80), 8, "v_head_dim"),
        (KVSpec(1, 2, 64, "float16", 16, v_head_dim=128), 8, "equal head dims"),
        (KVSpec(1, 2, 64, "float16", 16), 32, "query heads per KV head"),
    ],
)
def test_capabilities_say_what_they_refuse(spec, num_q_heads, word):
    narrow = Capabilities("narrow", ("NHD",), ("float16",), (64, 128), (8, 16), 8, mixed_head_dims=False)
    refusal = narrow.refusal(spec, num_q_heads)
    assert refusal is None if word is None else word in refusal


# ---------------------------------------------------------------------- options of attention


def test_options_convert_arguments_to_float32_or_bool():
    sinks, mask = np.ones(3), np.zeros((2, 5), np.float64)
    options = AttentionOptions(np.int32(4), 30, sinks, np.ones(3, np.float16), mask)
    assert options.features == FEATURES
    assert type(options.window) is int and type(options.soft_cap) is float
    for array in (options.sinks, options.alibi_slopes):
        assert array.dtype == np.float32 and not array.flags.writeable
    assert options.mask.dtype == np.float32
    sinks[:] = 7
    assert options.sinks.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_options_do_not_copy_a_mask_that_has_the_form(dtype):
    mask = np.ones((2, 4, 8), dtype)[:, ::2]
    assert AttentionOptions(mask=mask).mask is mask


def test_options_are_frozen_and_compare_by_identity():
    options = AttentionOptions(sinks=np.ones(2))
    with pytest.raises(AttributeError):
        options.window = 3
    assert options == options and options != AttentionOptions(sinks=np.ones(2))
    assert {options: 1}[options] == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("window", True, TypeError),
        ("window", 4.0, TypeError),
        ("window", 0, ValueError),
        ("window", 2**63, ValueError),
        ("soft_cap", True, TypeError),
        ("soft_cap", np.ones(1), TypeError),
        ("soft_cap", 0.0, ValueError),
        ("soft_cap", float("inf"), ValueError),
        ("soft_cap", 1e-60, ValueError),  # 0 in float32
        ("soft_cap", 1e39, ValueError),  # infinite in float32
        ("sinks", np.ones(2, np.int32), TypeError),
        ("sinks", np.ones((1, 2)), ValueError),
        ("sinks", np.array([1.0, np.nan]), ValueError),
        ("sinks", np.array([-np.inf]), ValueError),
        ("sinks", np.array([1e39]), ValueError),
        ("alibi_slopes", ["a"], TypeError),
        ("alibi_slopes", np.array([np.inf]), ValueError),
        ("mask", np.ones((2, 2), np.uint8), TypeError),
        ("mask", np.ones((1, 1, 1, 1), bool), ValueError),
    ],
)
def test_options_that_make_no_sense_are_refused(name, value, error):
    with pytest.raises(error, match=rf"^\[AttentionOptions\] {name} "):
        AttentionOptions(**{name: value})


def test_plan_arrays_are_read_from_any_object():
    """A backend asks for attributes, not for a class."""

    class Own:
        block_tables = np.array([[1, 2]], np.int32)
        seq_lens = np.array([5], np.int32)
        cu_q_lens = np.array([0, 5], np.int32)
        slot_mapping = np.array([4, 5, 6, 7, 8], np.int32)
        copies = np.zeros((0, 3), np.int32)

    backend = NumpyBackend(SPEC, 3)
    ones = np.ones((5, 2, 8), np.float32)
    backend.write(backend.prepare(Own()), 0, ones, ones)
    assert np.allclose(backend.attend(backend.prepare(Own()), 0, ones), 1)


@pytest.mark.parametrize("kind", ["rows", "heads first", "apart", "layers first"])
def test_move_rows_fills_what_stays_and_what_moves_whatever_lies_between(kind):
    """Into fewer rows, into as many, into more."""

    def rows(count):
        return {
            "rows": np.zeros((count, 5, 3, 2), np.uint8),
            "heads first": np.zeros((count, 3, 5, 2), np.uint8).swapaxes(1, 2),
            "apart": np.zeros((count, 5, 3, 4), np.uint8)[..., :2],
            "layers first": np.zeros((5, count, 3, 2), np.uint8).swapaxes(0, 1),
        }[kind]

    rng = np.random.default_rng(3)
    for have, size, moves in (
        (9, 6, [[8, 0], [6, 4]]),
        (9, 6, np.zeros((0, 2), np.int64)),
        (6, 6, np.zeros((0, 2), np.int64)),
        (6, 9, np.zeros((0, 2), np.int64)),
    ):
        old, new = rows(have), rows(size)
        old[:] = rng.integers(0, 256, old.shape)
        due = {row: old[row].tolist() for row in range(min(have, size))}
        due |= {target: old[source].tolist() for source, target in moves}
        move_rows(old, new, np.asarray(moves))
        assert {row: new[row].tolist() for row in due} == due
