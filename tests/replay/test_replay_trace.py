"""Trace files: the forms that are read, the token ids they become, and what is said about a malformed one."""

import gzip
import json
import random

import numpy as np
import pytest
from fuzz_seed import fresh_seed
from traces import make_trace

from benchmarks.replay import TraceError, read_trace, synthetic_trace

ROWS = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 27.5, "input_length": 1000, "output_length": 1, "hash_ids": [0, 9], "session": "a name"},
    {"timestamp": 27.5, "input_length": 3, "output_length": 500, "hash_ids": [5], "type": "text"},
]
GOOD = json.dumps(ROWS[0])
NPZ = {
    "block_size": np.int32(512),
    "t_ms": np.array([0, 27, 27]),
    "session": np.array([-1, -1, -1], np.int32),
    "input_length": np.array([1100, 1000, 3], np.int32),
    "output_length": np.array([20, 1, 500], np.int32),
    "run_off": np.array([0, 1, 3, 4]),
    "run_start": np.array([0, 0, 9, 5], np.int32),
    "run_len": np.array([3, 1, 1, 1], np.int32),
}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def rows_of(trace):
    """A trace as plain tuples."""
    columns = (trace.timestamps, trace.sessions, trace.prompts, trace.outputs)
    return [(*row, trace.ids_of(i).tolist()) for i, row in enumerate(zip(*(x.tolist() for x in columns), strict=True))]


def save_npz(path, **changed):
    """Write ROWS in the compact form, with members replaced (None: left out)."""
    np.savez(path, **{name: value for name, value in (NPZ | changed).items() if value is not None})
    return path


def test_all_forms_of_a_trace_are_the_same_trace(tmp_path):
    """Blank lines, members that nobody knows and fractions of a time are no errors."""
    trace = read_trace(write_lines(tmp_path / "a.jsonl", ROWS))
    published = rows_of(trace)
    assert (trace.name, trace.block_size, published[1]) == ("a.jsonl", 512, (27.5, -1, 1000, 1, [0, 9]))
    runs = [[[0, 3]], [[0, 1], [9, 1]], [[5, 1]]]
    compact = [
        {"block_size": 512},
        *(row | {"hash_ids": None, "runs": run} for row, run in zip(ROWS, runs, strict=True)),
    ]
    assert rows_of(read_trace(write_lines(tmp_path / "b.jsonl", compact))) == published
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert rows_of(read_trace(packed)) == published
    whole = [(int(time), *row) for time, *row in published]
    assert rows_of(read_trace(save_npz(tmp_path / "c.npz"))) == whole
    timeless = [(-1, *row) for _, *row in whole]
    assert rows_of(read_trace(save_npz(tmp_path / "e.npz", t_ms=None, session=None))) == timeless
    assert rows_of(trace.head(2)) == published[:2] and rows_of(trace.head(10_000)) == published


def test_block_size_given_by_the_reader_holds_where_the_file_tells_none(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", [{"input_length": 48, "output_length": 2, "hash_ids": [3, 4, 5]}])
    assert read_trace(path, block_size=16).block_size == 16
    with pytest.raises(ValueError, match=r"^\[read_trace\] block_size .*\(0\)"):
        read_trace(path, block_size=0)


def common_prefix(one, other):
    return int(np.append(one[: len(other)] == other[: len(one)], False).argmin())


@pytest.mark.parametrize("base", [0, -5, 2**31 - 2, 2**40, 2**80])
def test_tokens_of_31_bits_agree_exactly_as_far_as_the_ids_do(base, tmp_path):
    """Random requests over few ids of any size; prompts may end inside of a block or go on behind the ids."""
    rng, rows = random.Random(fresh_seed()), []
    for _ in range(40):
        ids = [base + rng.randrange(3) for _ in range(rng.randrange(5))]
        prompt = max(1, len(ids) * 4 + rng.randrange(-3, 6))
        rows.append((prompt, 3, ids[: -(-prompt // 4)]))
    lines = [{"input_length": prompt, "output_length": n, "hash_ids": ids} for prompt, n, ids in rows]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [{"block_size": 4}, *lines]))
    assert base == 2**80 or rows_of(trace) == rows_of(make_trace(rows))
    for i, (prompt, output, ids) in enumerate(rows):
        tokens = trace.tokens(i, prompt + output)
        assert tokens.dtype == np.int32 and tokens.min() >= 0
        assert len(tokens) == prompt + output and np.array_equal(tokens[:prompt], trace.tokens(i, prompt))
        for j, (other_prompt, _, other_ids) in enumerate(rows[:i]):
            hashed = min(prompt, other_prompt, len(ids) * 4, len(other_ids) * 4)
            alike = next((k for k, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b), 1 << 20)
            assert common_prefix(tokens, trace.tokens(j, other_prompt)) == min(hashed, alike * 4)


def bad_row(**changed):
    return json.dumps({"input_length": 5, "output_length": 1, "hash_ids": []} | changed)


@pytest.mark.parametrize(
    ("lines", "line", "said"),
    [
        ([GOOD, "{"], 2, "no JSON"),
        (['{"timestamp": 0, "output_length": 1, "hash_ids": []}'], 1, "input_length is missing"),
        ([bad_row(input_length=0)], 1, "(0), 1.."),
        ([bad_row(output_length=-1)], 1, "(-1), 0.."),
        ([bad_row(input_length=1e3)], 1, "(1000.0)"),
        ([bad_row(input_length=True)], 1, "(True)"),
        ([bad_row(input_length=99999999999)], 1, "(99999999999)"),
        ([bad_row(timestamp="now")], 1, "('now')"),
        ([bad_row(timestamp=float("nan"))], 1, "(nan)"),
        (['{"timestamp": 1%s, "input_length": 5}' % ("0" * 5000)], 1, "no JSON"),
        ([bad_row(timestamp=10**30)], 1, "64 bits"),
        ([bad_row(hash_ids=3)], 1, "hash_ids is not a list"),
        ([bad_row(hash_ids=[1.5])], 1, "hash_ids is not a list"),
        ([bad_row(hash_ids=[1, 2])], 1, "(2), 1"),
        ([bad_row(runs=[[0, -1]])], 1, "runs is not a list"),
        ([bad_row(runs=[[0, 10**12]])], 1, "(1000000000000), 1"),
        (['{"block_size": 0}', GOOD], 1, "block_size is out of range (0)"),
        ([GOOD, '{"block_size": 16}'], 2, "input_length is missing"),
    ],
)
def test_malformed_line_is_named(tmp_path, lines, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"[read_trace] {path}:{line}: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run_len": None}, "run_len is missing"),
        ({"output_length": np.array([1, 2])}, "different lengths"),
        ({"run_off": np.array([0, 3, 1, 4])}, "run_off"),
        ({"run_len": np.array([3, 1, -1, 1])}, "run_len is out of range"),
        ({"run_len": np.array([3, 1, 2**30, 1])}, "row 1: more hash ids"),
        ({"input_length": np.array([1100, 0, 3])}, "row 1: input_length"),
        ({"output_length": np.array([20, 1, -1])}, "row 2: output_length"),
        ({"input_length": np.array([1100.0, 1000.0, 3.0])}, "input_length has the wrong type"),
        ({"block_size": np.array([512])}, "block_size has the wrong type"),
        ({"block_size": np.int32(0)}, "row 0: more hash ids"),
        ({"run_start": np.array([None, 1, 2, 3])}, "no .npz archive"),
    ],
)
def test_malformed_npz_is_named(tmp_path, changed, said):
    path = save_npz(tmp_path / "bad.npz", **changed)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"[read_trace] {path}: ") and said in str(caught.value)


@pytest.mark.parametrize("form", ["npz", "jsonl", "jsonl.gz"])
def test_damaged_file_is_a_trace_or_refused_in_one_line(tmp_path, form):
    """Random bytes of a good file changed, or its end cut off: `TraceError` alone, whatever the unpackers raise."""
    rng, path = random.Random(fresh_seed()), tmp_path / f"damaged.{form}"
    text = write_lines(tmp_path / "good.jsonl", ROWS * 10).read_bytes()
    forms = {"npz": save_npz(tmp_path / "good.npz").read_bytes(), "jsonl": text, "jsonl.gz": gzip.compress(text)}
    for number in range(300):
        damaged = bytearray(forms[form])
        if number % 10 == 0:
            del damaged[0 if number == 0 else rng.randrange(len(damaged)) :]
        for _ in range(rng.randrange(1, 4) if damaged else 0):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert len(read_trace(path))
        except TraceError as exc:
            assert str(exc).startswith("[read_trace] ") and "\n" not in str(exc)


def test_file_without_a_request_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"block_size": 16}\n')
    with pytest.raises(TraceError, match=r"^\[read_trace\] .*no request in it"):
        read_trace(path)
    assert len(synthetic_trace(2, 8).head(0)) == 0
