"""``python -m benchmarks.attention``: what it times, what it believes, and which gates it calls missed.

The measuring is tested with a clock that stands still while nobody works, the rest with kernels in numpy that can be
told to be slow, wrong or noisy: every gate has a fault that it must catch.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.attention import command, decode, dense, gates, moves, prefill, scores
from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import ELEMENTS, PagedCall, WrongResult, narrowed, random_elements, widened
from benchmarks.attention.rows import CACHED_NBYTES, Row, timed
from benchmarks.attention.settings import Settings
from benchmarks.command import main
from benchmarks.gate import Gate, as_text
from kvpool.cli.bench import measure
from kvpool.cli.bench.measure import ROUNDS_PER_REPETITION, RUNS_MIN, Contestant, race
from kvpool.config import KVSpec
from kvpool.testing.dense import dense_attention, dense_scores

DTYPES = ("float32", "bfloat16", "float16")
ALL_PARTS = {"decode", "prefill", "write", "copy", "raw", "mass"}  # of rows

# ---------------------------------------------------------------------------------------------- measuring


class Clock:
    """Time that passes only while a contestant works; `seconds` is a list of what its runs take, the last repeats."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def contestant(self, name, *seconds, **options):
        """The first run is the warm-up: it takes a second, which must not be seen anywhere."""
        left = [1.0, *seconds]

        def run():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Contestant(name, run, **options)


def test_race_reports_least_and_median_per_call():
    clock = Clock()
    read, kernel = clock.contestant("read", 2.4, 2, 2.2), clock.contestant("kernel", 12, 8, 40, calls=2)
    result = race(read, [kernel], 3, clock)
    assert (result.yardstick.best, result.yardstick.median) == pytest.approx((2, 2.2))
    timing = result.timings["kernel"]
    assert (timing.best, timing.median, timing.runs) == pytest.approx((4, 6, 3))
    assert (result.repetitions, result.rejected, result.is_complete) == (3, 0, True)


def test_race_takes_turns_and_everybody_comes_first():
    clock = Clock()
    names = ("read", "a", "b")
    contestants = [clock.contestant(name, 1) for name in names]
    race(contestants[0], contestants[1:], 3, clock)
    rounds = [tuple(clock.log[i : i + 3]) for i in range(0, len(clock.log), 3)]
    assert rounds == [names, names, ("a", "b", "read"), ("b", "read", "a")]


def test_race_disturbed_read_rejects_the_round_for_everybody():
    """In the round in which the read was disturbed the kernel was at its fastest: that must not count."""
    clock = Clock()
    read = clock.contestant("read", 1, 1.3, 1.1)
    kernel = clock.contestant("kernel", 2, 0.5, 2.2)
    result = race(read, [kernel], 2, clock)
    assert (result.repetitions, result.rejected) == (2, 1)
    assert result.timings["kernel"].best == pytest.approx(2)
    assert result.yardstick.median == pytest.approx(1.05)


def test_race_first_rounds_are_judged_by_the_best_that_comes_later():
    clock = Clock()
    read = clock.contestant("read", 2, 2, 1)
    kernel = clock.contestant("kernel", 0.1, 0.1, 3)
    result = race(read, [kernel], 3, clock)
    assert result.rejected == 2
    assert result.timings["kernel"].best == pytest.approx(3)


def test_race_noise_without_end_is_given_up_and_said():
    clock = Clock()
    read = clock.contestant("read", 1, *(2,) * 100)
    result = race(read, [clock.contestant("kernel", 1)], 5, clock)
    assert (result.repetitions, result.rejected) == (1, 5 * ROUNDS_PER_REPETITION - 1)
    assert not result.is_complete


def test_race_slow_contestant_sits_out_when_its_time_is_up():
    clock = Clock()
    slow = clock.contestant("slow", 10, seconds=15)
    result = race(clock.contestant("read", 1), [slow], 15, clock)
    assert result.timings["slow"].runs == RUNS_MIN
    assert result.repetitions == 15


def test_timed_scales_the_yardstick_to_the_work():
    clock = Clock()
    result = race(clock.contestant("sgemm", 2), [clock.contestant("prefill", 8)], 1, clock)
    row = make_row(part="prefill", **timed(result, "prefill", work=3.0))
    assert row.ratio == pytest.approx(8 / 6)


# -------------------------------------------------------------------------------------------------- gates


def make_row(part="decode", **fields):
    """A row that reaches every goal."""
    values = {
        "part": part,
        "dtype": "float32",
        "threads": 1,
        "layout": "NHD",
        "block_size": 16,
        "batch": 16,
        "context": 4096,
        "nbytes": 4 * CACHED_NBYTES,
        "yardstick": "read",
        "best": 1.0,
        "median": 1.1,
        "yardstick_best": 1.0,
        "yardstick_median": 1.0,
        "repetitions": 15,
        "rejected": 0,
        "is_complete": True,
        "dense": {"torch": 3.0},
    }
    return Row(**(values | fields))


def good_rows(dtype="float32"):
    """Rows that decide every gate of one dtype, each of them well inside of its goal."""
    alone = [make_row(dtype=dtype, batch=1, context=16384, nbytes=CACHED_NBYTES, threads=t) for t in (1, 2)]
    return [
        make_row(dtype=dtype),
        *alone,
        make_row("prefill", dtype=dtype, yardstick="sgemm"),
        make_row("write", dtype=dtype, yardstick="memcpy", nbytes=2**22),
        make_row("copy", dtype=dtype, yardstick="memcpy"),
        make_row("raw", dtype=dtype, yardstick="decode", median=1.01, nbytes=2**22),
    ]


def good_quantized_rows(bits="8"):
    """The same of one number of bits."""
    return [
        make_row("quantized", dtype=f"{bits} bits", yardstick="decode", best=0.9),
        make_row("write", dtype=f"{bits} bits", yardstick="memcpy", nbytes=2**22),
    ]


def missed(rows, isa="avx512", **settings):
    return {gate.name for gate in gates.decide(rows, Settings(**settings), isa) if not gate.holds}


@pytest.mark.parametrize(("isa", "count"), [("avx512", 23), ("avx2", 23), ("neon", 23), ("portable", 3)])
def test_gates_good_rows_hold_and_reach_their_goals(isa, count):
    rows = [row for dtype in DTYPES for row in good_rows(dtype)]
    rows += [row for bits in "84" for row in good_quantized_rows(bits)]
    decided = gates.decide(rows, Settings(kv_bits=("8", "4", "fp8")), isa)
    assert all(gate.holds and (gate.goal is None or gate.reaches_goal) for gate in decided)
    assert as_text(decided).splitlines()[-1] == f"{count} of {count} gates hold"


@pytest.mark.parametrize(
    ("number", "fault", "gate"),
    [
        (0, {"best": 1.51, "dense": {"torch": 9}}, "decode float32"),
        (0, {"dense": {"torch": 1.79}}, "decode float32 against torch"),
        (6, {"median": 1.031}, "decode with raw scores float32"),
    ],
)
def test_gates_planted_fault_is_missed_and_no_other(number, fault, gate):
    rows = good_rows()
    rows[number] = replace(rows[number], **fault)
    assert missed(rows, dtypes=("float32",)) == {gate}


def test_gates_worst_row_decides():
    rows = [make_row(best=1.2), make_row(best=1.7, batch=64), make_row(best=1.3)]
    gate = gates.decide(rows, Settings(parts=("decode",), dtypes=("float32",)), "avx512")[0]
    assert (gate.value, gate.note) == (1.7, "float32 64 x 4k, 1 thread")


@pytest.mark.parametrize(
    "fault",
    [
        {"nbytes": CACHED_NBYTES - 1},
        {"batch": 1, "context": 4096},
        {"is_complete": False},
    ],
)
def test_gates_row_that_must_not_decide_leaves_the_gate_undecided(fault):
    rows = [make_row(**fault)]
    decided = gates.decide(rows, Settings(parts=("decode",), dtypes=("float32",)), "avx512")
    assert [gate.value for gate in decided] == [None] * 3
    assert not any(gate.holds for gate in decided)
    assert "not decided" in as_text(decided)


def test_gate_direction():
    less, more = (Gate("x", 1.5, 2.0, at_most, goal=1.0) for at_most in (True, False))
    assert (less.holds, less.reaches_goal) == (True, False)
    assert (more.holds, more.reaches_goal) == (False, True)


def test_row_ratio_is_time_over_time_of_the_yardstick():
    row = make_row(best=3.0, median=5.0, yardstick_best=2.0, yardstick_median=2.5, nbytes=6 * 10**9)
    assert (row.ratio, row.median_ratio) == (1.5, 2.0)
    assert (row.rate, row.yardstick_rate) == (2.0, 3.0)  # GB/s


# ------------------------------------------------------------------------------------- kernels to measure


class NumpyStore:
    """`BlockStore` in float64 numpy; `kernels` says how it misbehaves."""

    def __init__(self, kernels, spec, num_blocks, arrays, num_threads=None):
        assert [array.shape for array in arrays] == [spec.plane_layout(name, num_blocks).shape for name in "kv"]
        self.kernels, self.spec, self.planes, self.scores_scratch_nbytes = kernels, spec, arrays, 0
        self.by_slot = [array.swapaxes(1, 2) if spec.layout == "HND" else array for array in arrays]

    def attend(self, layer, q, out, block_tables, seq_lens, cu_q_lens, scores=None, scores_out=None):
        time.sleep(self.kernels.attend_seconds + (scores is not None) * self.kernels.scores_seconds)
        for row, length in enumerate(seq_lens):
            mine = slice(cu_q_lens[row], cu_q_lens[row + 1])
            k, v = (
                widened(array[block_tables[row]], self.spec.dtype).reshape(-1, *array.shape[2:])[:length]
                for array in self.by_slot
            )
            result, _ = dense_attention(widened(q[mine], self.spec.dtype), k, v)
            if scores is not None:
                scores_out[row] = dense_scores(widened(q[mine], self.spec.dtype), k, scores) + self.kernels.wrong
            out[mine] = narrowed((result + self.kernels.wrong).astype(np.float32), self.spec.dtype)

    def write(self, layer, k, v, slots):
        time.sleep(self.kernels.move_seconds)
        blocks, offsets = np.divmod(slots + self.kernels.slot_shift, self.spec.block_size)
        for array, x in zip(self.by_slot, (k, v), strict=True):
            array[blocks % len(array), offsets] = narrowed(x, self.spec.dtype)

    def copy_blocks(self, copies):
        time.sleep(self.kernels.move_seconds)
        for array in self.planes:
            array[copies[:, 1]] = array[copies[:, 0]] if not self.kernels.slot_shift else 0


class NumpyKernels:
    """What `kvpool_backends.cpu._kernels` offers, slow or wrong on request."""

    attend_seconds = move_seconds = scores_seconds = wrong = 0.0
    slot_shift = 0

    def BlockStore(self, *args, **options):
        return NumpyStore(self, *args, **options)

    def read_sum(self, arrays, num_threads=None):
        return float(sum(int(array.view(np.uint8).max()) for array in arrays))

    def isas(self):
        return ("numpy",)

    def default_isa(self):
        return "numpy"

    def num_threads(self):
        return 2

    def tilings(self):
        return {"numpy": {"layout": "HND"}}


SMALL = Settings(
    parts=("decode",),
    dtypes=("float32",),
    block_sizes=(8, 16),
    batches=(1, 3),
    contexts=(40,),
    threads=(1, 2),
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    repetitions=2,
)


@pytest.fixture
def small(monkeypatch):
    """Sizes of the parts that have no options for them."""
    monkeypatch.setattr(prefill, "CONTEXT", 40)
    monkeypatch.setattr(prefill, "NUM_QUERIES", 8)
    monkeypatch.setattr(prefill, "SIDE", 16)
    monkeypatch.setattr(scores, "RUN_NBYTES", 1)
    monkeypatch.setattr(moves, "POOL_NBYTES", 2**20)
    monkeypatch.setattr(moves, "NUM_TOKENS", 32)
    monkeypatch.setattr(moves, "NUM_PAIRS", 8)


@pytest.fixture
def kernels(small, monkeypatch):
    """Kernels in numpy."""
    made = NumpyKernels()
    monkeypatch.setattr(command, "load_kernels", lambda: made)
    return made


def paged_call(kernels, dtype, layout="NHD", num_queries=1):
    rng = np.random.default_rng(3)
    spec = KVSpec(1, 2, 8, dtype=dtype, block_size=8, layout=layout)
    planes = tuple(random_elements(rng, 3 * 48 * 2 * 8 + 5, dtype) for _ in "kv")
    return PagedCall(
        kernels, spec, planes, batch=3, context=43, num_q_heads=4, num_threads=1, rng=rng, num_queries=num_queries
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_paged_call_right_kernels_pass_its_check(dtype, layout, num_queries):
    call = paged_call(NumpyKernels(), dtype, layout, num_queries)
    for seed in range(6):
        assert call.checked_error(np.random.default_rng(seed)) < 1e-2
    assert sorted(call.tables.reshape(-1)) == list(range(call.num_blocks))  # no block is free


@pytest.mark.parametrize(("dtype", "wrong"), [("float32", 1e-5), ("bfloat16", 0.05), ("float16", 0.01)])
def test_paged_call_wrong_result_is_refused(dtype, wrong):
    kernels = NumpyKernels()
    kernels.wrong = wrong
    with pytest.raises(WrongResult, match=f"{dtype}, blocks of 8, 3 x 43 tokens"):
        paged_call(kernels, dtype).checked_error(np.random.default_rng(0))


@pytest.mark.parametrize("rival", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rival_computes_attention(rival, dtype):
    """A rival that does something else would make a fine ratio."""
    pytest.importorskip(rival)
    rng = np.random.default_rng(5)
    q, k, v = (random_elements(rng, (3, 2, n, 8), dtype) for n in (4, 37, 37))
    out = dense.MAKERS[rival](q, k, v, dtype)()
    if rival == "torch":  # it hands no bfloat16 to numpy
        out = out.float().numpy()
    for row in range(3):
        tokens = (widened(x[row], dtype).swapaxes(0, 1) for x in (k, v))
        expected, _ = dense_attention(widened(q[row], dtype).reshape(1, 8, 8), *tokens)
        error = np.abs(out[row].reshape(8, 8) - expected[0]).max() / np.abs(expected).max()
        assert error < {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


def test_prefill_flops_count_visible_pairs():
    pairs = sum(key <= query for query in range(40 - 8, 40) for key in range(40))
    assert prefill.flops(8, 40, 4, 16) == pairs * 4 * 16 * 4


# ------------------------------------------------------------------------------------------ whole measurements


def test_decode_every_case_has_its_rows(kernels):
    bench = Bench(kernels, SMALL, {"numpy": ""})
    rows = list(decode.rows(bench))
    assert [(r.batch, r.threads, r.block_size) for r in rows] == [
        (batch, threads, size) for batch in (1, 3) for threads in (1, 2) for size in (8, 16)
    ]
    assert {row.nbytes for row in rows} == {batch * 40 * 2 * 2 * 8 * 4 for batch in (1, 3)}
    assert all(row.dense["numpy"] > 0 for row in rows if row.threads == dense.num_cpus())
    assert all(row.best <= row.median and row.error < 2e-6 for row in rows)


def test_decode_sleeping_kernels_miss_their_gate(kernels, monkeypatch):
    """The fault is planted in the kernels, and seen at the other end."""
    monkeypatch.setattr("benchmarks.attention.rows.CACHED_NBYTES", 1)
    monkeypatch.setattr(gates, "NUM_TOKENS", 1)
    monkeypatch.setattr(gates, "HEADS", (4, 2, 8))
    monkeypatch.setattr(gates, "REPETITIONS", 1)
    monkeypatch.setattr(measure, "UNDISTURBED", 0.0)  # every round counts, or a busy machine decides nothing
    kernels.attend_seconds = 0.02
    settings = replace(SMALL, threads=(1,), batches=(1,))
    gate = gates.decide(command.measure(Bench(kernels, settings), quiet=True), settings, "avx512")[0]
    assert gate.value > 1.5 and not gate.holds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", [moves.Writes, moves.Copies])
def test_moves_compare_as_many_bytes(kernels, dtype, layout, kind):
    work = kind(moves.Store(Bench(kernels, replace(SMALL, layout=layout)), dtype, 1))
    work.check()
    work.run()
    calls = work.memcpy()
    assert {sum(dst.nbytes for dst, _ in pairs) for pairs in calls} == {work.nbytes}
    assert all(dst.dtype == src.dtype == ELEMENTS[dtype] for pairs in calls for dst, src in pairs)
    addresses = [dst.ctypes.data for pairs in calls for dst, _ in pairs]
    assert len(set(addresses)) == len(addresses)  # every call goes elsewhere


@pytest.mark.parametrize("kind", [moves.Writes, moves.Copies])
def test_moves_to_the_wrong_place_are_refused(kernels, kind):
    kernels.slot_shift = 1
    with pytest.raises(WrongResult):
        kind(moves.Store(Bench(kernels, SMALL), "float32", 1)).check()


def test_too_large_sizes_are_left_out_and_said(kernels):
    pool_nbytes = 40 * 2 * 2 * 8 * 4
    settings = replace(SMALL, block_sizes=(8,), memory_nbytes=pool_nbytes)
    bench = Bench(kernels, settings, {"numpy": ""})
    rows = list(decode.rows(bench))
    assert {row.batch for row in rows} == {1}
    assert not any(row.dense for row in rows)
    assert [what for what, _ in bench.left_out] == ["numpy, float32 1 x 40", "decode float32 3 x 40"]
    assert all("--max-memory" in why for _, why in bench.left_out)


# ------------------------------------------------------------------------------------------------ the command

ARGUMENTS = ["--block-size", "8,16", "--batch", "1,3", "--context", "40", "--heads", "4/2", "--head-dim", "8"]


def run_command(*options):
    return main(command, [*ARGUMENTS, "--repetitions", "2", "--against", "numpy,torch", *options])


@pytest.mark.long
def test_command_json_has_everything(kernels, capsys):
    assert run_command("--json") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == ""
    assert {row["part"] for row in facts["rows"]} == ALL_PARTS
    decode_rows = [row for row in facts["rows"] if row["part"] == "decode"]
    assert len(decode_rows) == 3 * 2 * 2 * 2  # dtypes, batches, threads, block sizes
    for row in decode_rows:
        assert row["ratio"] == pytest.approx(row["best"] / row["yardstick_best"])
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["best"] / 1e9)
        assert row["is_cached"]
    assert facts["isa"] == "numpy"
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["settings"]["contexts"] == [40]
    assert facts["held"] is False
    assert all(gate["value"] is None for gate in facts["gates"] if gate["name"].startswith("decode"))


def test_command_shows_tables_progress_and_summary(kernels, capsys):
    assert run_command("--dtype", "float32") == 0
    out, err = capsys.readouterr()
    assert "1 x 40" in out and "cached" in out and "/ read, 8" in out
    assert re.search(r"^0 of \d+ gates hold \(\d+ s\)$", out.splitlines()[-1])
    steps = err.splitlines()
    assert steps[0].startswith("[1/") and len(steps) == int(steps[0].split("/")[1].split("]")[0])
    assert max(len(line) for line in out.splitlines()[:-1]) < 200


def test_command_wrong_result_stops_it(kernels, capsys):
    kernels.wrong = 1.0
    assert run_command("--part", "decode") == 2
    assert "a result is wrong" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_command_measures_the_real_kernels(small, capsys, layout):
    """Every part, in small; the results are checked by the command itself."""
    assert run_command("--json", "--layout", layout, "--repetitions", "1") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in facts["rows"]} == ALL_PARTS
    assert {row["layout"] for row in facts["rows"]} == {layout}
    assert all(0 < row["best"] <= row["median"] for row in facts["rows"])
    assert facts["isa"] in ("portable", "avx2", "avx512", "neon")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int3"], "--dtype int3: there are float32, bfloat16, float16"),
        (["--block-size", "8,none"], "--block-size none: not a whole number"),
        (["--batch", "0"], "--batch 0: out of range"),
        (["--heads", "32/5"], "32 is no multiple of 5"),
        (["--max-memory", "much"], "--max-memory"),
    ],
)
def test_command_bad_option_is_named_before_any_work(kernels, capsys, options, said):
    assert run_command(*options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err and err.startswith("python -m benchmarks.attention: ")
    assert len(err.splitlines()) == 1
