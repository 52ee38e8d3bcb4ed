"""``python -m benchmarks.attention``: rounds that count, and what the command measures and refuses."""

from __future__ import annotations

import json

import pytest

from benchmarks.attention import command, moves, prefill, scores
from benchmarks.attention.cache import PagedCall
from benchmarks.command import main
from kvpool.cli.bench.measure import Contestant, race

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


def test_race_disturbed_read_rejects_the_round_for_everybody():
    """In the round in which the read was disturbed the kernel was at its fastest: that must not count."""
    clock = Clock()
    read = clock.contestant("read", 1, 1.3, 1.1)
    kernel = clock.contestant("kernel", 2, 0.5, 2.2)
    result = race(read, [kernel], 2, clock)
    assert (result.repetitions, result.rejected) == (2, 1)
    assert result.timings["kernel"].best == pytest.approx(2)
    assert result.yardstick.median == pytest.approx(1.05)


# ------------------------------------------------------------------------------------------------ the command

ARGUMENTS = ["--block-size", "8,16", "--batch", "1,3", "--context", "40", "--heads", "4/2", "--head-dim", "64"]


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


def run_command(*options):
    return main(command, [*ARGUMENTS, "--repetitions", "1", *options])


@pytest.mark.long
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_command_measures_every_part_of_the_kernels(small, capsys, layout):
    """The results are checked by the command itself."""
    assert run_command("--json", "--layout", layout, "--kv-bits", "8/4,fp8") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in facts["rows"]} == ALL_PARTS | {"quantized"}
    assert {row["layout"] for row in facts["rows"] if row["dtype"] in DTYPES} == {layout}
    assert {row["dtype"] for row in facts["rows"] if row["part"] == "quantized"} == {"8/4 bits", "fp8"}
    decode_rows = [row for row in facts["rows"] if row["part"] == "decode"]
    assert len(decode_rows) == 3 * 2 * 2 * len({row["threads"] for row in decode_rows})  # dtypes, batches, block sizes
    for row in decode_rows:
        assert row["ratio"] == pytest.approx(row["best"] / row["yardstick_best"])
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["best"] / 1e9)
    assert facts["isa"] in ("portable", "avx2", "avx512", "neon") and facts["held"] is False
    assert all(gate["value"] is None for gate in facts["gates"] if gate["name"].startswith("decode"))


def test_command_stops_at_a_wrong_result(small, capsys, monkeypatch):
    right = PagedCall.attend

    def wrong(call):
        right(call)
        call.out += 1

    monkeypatch.setattr(PagedCall, "attend", wrong)
    assert run_command("--part", "decode", "--dtype", "float32") == 2
    assert "a result is wrong" in capsys.readouterr().err
