"""Trace files: the forms that are read, the token ids they become, and what is said about a malformed one."""

import gzip
import json
import random

import numpy as np
import pytest
from traces import make_trace

from benchmarks.replay import TraceError, read_trace, synthetic_trace

ROWS = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 27, "input_length": 1000, "output_length": 1, "hash_ids": [0, 9]},
    {"timestamp": 27, "input_length": 3, "output_length": 500, "hash_ids": [5]},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(trace):
    """A trace as plain tuples."""
    columns = (trace.timestamps, trace.sessions, trace.prompts, trace.outputs)
    return [(*map(int, row), trace.ids_of(i).tolist()) for i, row in enumerate(zip(*columns, strict=True))]


def save_npz(path, **changed):
    """Write ROWS in the compact form, with members replaced (None: left out)."""
    members = {
        "block_size": np.int32(512),
        "t_ms": np.array([0, 27, 27]),
        "session": np.array([-1, -1, -1], np.int32),
        "input_length": np.array([1100, 1000, 3], np.int32),
        "output_length": np.array([20, 1, 500], np.int32),
        "run_off": np.array([0, 1, 3, 4]),
        "run_start": np.array([0, 0, 9, 5], np.int32),
        "run_len": np.array([3, 1, 1, 1], np.int32),
    }
    np.savez(path, **{name: value for name, value in (members | changed).items() if value is not None})
    return path


def test_all_forms_of_a_trace_are_the_same_trace(tmp_path):
    trace = read_trace(write_lines(tmp_path / "a.jsonl", ROWS))
    published = rows_of(trace)
    assert (trace.name, trace.block_size, published[1]) == ("a.jsonl", 512, (27, -1, 1000, 1, [0, 9]))
    runs = [[[0, 3]], [[0, 1], [9, 1]], [[5, 1]]]
    compact = [
        {"block_size": 512, "origin": "somewhere"},
        *({**row, "hash_ids": None, "runs": run} for row, run in zip(ROWS, runs, strict=True)),
    ]
    assert rows_of(read_trace(write_lines(tmp_path / "b.jsonl", compact))) == published
    assert rows_of(read_trace(save_npz(tmp_path / "c.npz"))) == published
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert rows_of(read_trace(packed)) == published


def test_npz_without_times_and_sessions_is_a_trace(tmp_path):
    trace = read_trace(save_npz(tmp_path / "t.npz", t_ms=None, session=None))
    assert rows_of(trace)[1] == (-1, -1, 1000, 1, [0, 9])


def test_unknown_members_blank_lines_and_fractional_times_are_no_errors(tmp_path):
    rows = [{"timestamp": 0.5, "input_length": 20, "output_length": 2, "hash_ids": [3], "type": "text"}]
    rows[0]["session"] = "a name"
    path = write_lines(tmp_path / "t.jsonl", rows)
    path.write_text("\n" + path.read_text() + "\n\n")
    trace = read_trace(path)
    assert (len(trace), trace.timestamps[0], trace.sessions[0]) == (1, 0.5, -1)


def test_block_size_given_by_the_reader_holds_where_the_file_tells_none(tmp_path):
    rows = [{"timestamp": 0, "input_length": 48, "output_length": 2, "hash_ids": [3, 4, 5]}]
    path = write_lines(tmp_path / "t.jsonl", rows)
    assert read_trace(path, block_size=16).block_size == 16
    with pytest.raises(TraceError, match=r":1: more hash ids .* \(3\), 1"):
        read_trace(path)
    with pytest.raises(ValueError, match=r"^\[read_trace\] block_size .*\(0\)"):
        read_trace(path, block_size=0)


@pytest.mark.parametrize("ids", [[-5, 3], [2**40, 2**40 + 1], [2**63, 2**80], [2**31 - 2, 2**31 - 1]])
def test_ids_of_any_size_become_tokens_of_31_bits(tmp_path, ids):
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids},
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [*ids, ids[0]]},
    ]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", rows))
    first, second = trace.tokens(0, 1024), trace.tokens(1, 1100)
    assert first.dtype == np.int32
    assert first.min() >= 0
    assert second.min() >= 0
    assert np.array_equal(first, second[:1024])
    assert first[0] != first[512]


def common_prefix(one, other):
    return int(np.append(one[: len(other)] == other[: len(one)], False).argmin())


def test_tokens_agree_exactly_as_far_as_the_ids_do():
    """Random requests over few ids, unchained too; prompts may end inside of a block or go on behind the ids."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, rows = random.Random(seed), []
    for _ in range(60):
        ids = [rng.randrange(3) for _ in range(rng.randrange(5))]
        prompt = max(1, len(ids) * 4 + rng.randrange(-3, 6))
        rows.append((prompt, 3, ids[: -(-prompt // 4)]))
    trace = make_trace(rows)
    for i, (prompt, output, ids) in enumerate(rows):
        tokens = trace.tokens(i, prompt + output)
        assert len(tokens) == prompt + output and np.array_equal(tokens[:prompt], trace.tokens(i, prompt))
        for j, (other_prompt, _, other_ids) in enumerate(rows[:i]):
            hashed = min(prompt, other_prompt, len(ids) * 4, len(other_ids) * 4)
            expected = min(hashed, common_prefix(np.array(ids), np.array(other_ids)) * 4)
            assert common_prefix(tokens, trace.tokens(j, other_prompt)) == expected


def test_head_keeps_the_first_requests():
    trace = synthetic_trace(2, 8)
    assert rows_of(trace.head(5)) == rows_of(trace)[:5]
    assert rows_of(trace.head(10_000)) == rows_of(trace)


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("lines", "line", "said"),
    [
        ([GOOD, "{"], 2, "no JSON"),
        (['{"timestamp": 0, "output_length": 1, "hash_ids": []}'], 1, "input_length is missing"),
        (['{"input_length": 0, "output_length": 1, "hash_ids": []}'], 1, "(0), 1.."),
        (['{"input_length": 5, "output_length": -1, "hash_ids": []}'], 1, "(-1), 0.."),
        (['{"input_length": 1e3, "output_length": 1, "hash_ids": []}'], 1, "(1000.0)"),
        (['{"input_length": true, "output_length": 1, "hash_ids": []}'], 1, "(True)"),
        (['{"input_length": 99999999999, "output_length": 1, "hash_ids": []}'], 1, "(99999999999)"),
        (['{"timestamp": "now", "input_length": 5, "output_length": 1, "hash_ids": []}'], 1, "('now')"),
        (['{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": []}'], 1, "(nan)"),
        (['{"timestamp": 1%s, "input_length": 5}' % ("0" * 5000)], 1, "no JSON"),
        (['{"timestamp": 1%s, "input_length": 5, "output_length": 1}' % ("0" * 30)], 1, "64 bits"),
        (['{"input_length": 5, "output_length": 1, "hash_ids": 3}'], 1, "hash_ids is not a list"),
        (['{"input_length": 5, "output_length": 1, "hash_ids": [1.5]}'], 1, "hash_ids is not a list"),
        (['{"input_length": 5, "output_length": 1, "hash_ids": [1, 2]}'], 1, "(2), 1"),
        (['{"input_length": 5, "output_length": 1, "runs": [[0, -1]]}'], 1, "runs is not a list"),
        (['{"input_length": 5, "output_length": 1, "runs": [[0, 1000000000000]]}'], 1, "(1000000000000), 1"),
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
    assert message.startswith(f"[read_trace] {path}:{line}: ")
    assert said in message
    assert "\n" not in message


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
    assert str(caught.value).startswith(f"[read_trace] {path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.npz", b"no archive"),
        ("t.npz", b"PK\x03\x04 cut off"),
        ("t.npz", b""),
        ("t.jsonl", b""),
        ("t.jsonl", b'{"block_size": 16}\n'),
        ("t.jsonl", b"\xff\xfe\x00"),
        ("t.jsonl.gz", b"no gzip"),
        ("t.jsonl.gz", gzip.compress(GOOD.encode() * 50)[:-9]),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"^\[read_trace\] "):
        read_trace(path)


@pytest.mark.parametrize("form", ["npz", "jsonl", "jsonl.gz"])
def test_damaged_file_is_a_trace_or_refused_in_one_line(tmp_path, form):
    """Random bytes of a good file changed: no exception but TraceError, whatever the unpackers raise."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = write_lines(tmp_path / "good.jsonl", ROWS * 10).read_bytes()
    good = {
        "npz": save_npz(tmp_path / "good.npz").read_bytes(),
        "jsonl": text,
        "jsonl.gz": gzip.compress(text),
    }[form]
    path = tmp_path / f"damaged.{form}"
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_trace(path)
        except TraceError as exc:
            assert "\n" not in str(exc)
