"""``python -m benchmarks.attention``: rounds that count, and what the command measures and refuses."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention
from benchmarks.command import main
from benchmarks.measure import Contestant, race

DTYPES = ("float32", "bfloat16", "float16")
ALL_PARTS = {"decode", "prefill", "write", "copy", "raw", "mass"}  # of rows

# ---------------------------------------------------------------------------------------------- measuring


def test_race_disturbed_read_rejects_the_round_for_everybody():
    """In the round in which the read was disturbed the kernel was at its fastest: that must not count.

    The first run of each is the warm-up: it takes a second, which must not be seen anywhere.
    """
    seconds, passed = {"read": [1.0, 1, 1.3, 1.1], "kernel": [1.0, 2, 0.5, 2.2]}, [0.0]
    read, kernel = (Contestant(name, lambda left=left: passed.append(left.pop(0))) for name, left in seconds.items())
    result = race(read, [kernel], 2, lambda: sum(passed))
    assert result.repetitions == 2 and result.is_complete and not seconds["read"]
    assert result.timings["kernel"].best == pytest.approx(2)
    assert result.yardstick.median == pytest.approx(1.05)


# ------------------------------------------------------------------------------------------------ the command

ARGUMENTS = ["--batch", "1,3", "--context", "40", "--repetitions", "1"]
SMALL = {"NUM_Q_HEADS": 4, "NUM_KV_HEADS": 2, "HEAD_DIM": 64, "PREFILL": (8, 40), "SIDE": 16, "RUN_NBYTES": 1}
SMALL |= {"MOVED_NBYTES": 2**20, "WRITTEN": 32, "PAIRS": 8}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(attention, name, value)


@pytest.mark.long
def test_command_measures_every_part_of_the_kernels(capsys):
    """The results are checked by the command itself."""
    assert main(attention, [*ARGUMENTS, "--json", "--kv-bits", "8/4,fp8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in facts["rows"]} == ALL_PARTS | {"quantized"}
    assert {row["dtype"] for row in facts["rows"] if row["part"] == "quantized"} == {"8/4 bits", "fp8"}
    decode_rows = [row for row in facts["rows"] if row["part"] == "decode"]
    assert len(decode_rows) == 3 * 2 * len({row["threads"] for row in decode_rows})  # dtypes, batches
    for row in decode_rows:
        assert row["ratio"] == pytest.approx(row["best"] / row["yardstick_best"])
        assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["best"] / 1e9)
    assert facts["isa"] in ("portable", "avx2", "avx512", "neon")
    assert not any(gate["holds"] for gate in facts["gates"])
    assert all(gate["value"] is None for gate in facts["gates"] if gate["name"].startswith("decode"))


def test_command_stops_at_a_wrong_result(capsys, monkeypatch):
    right = attention.Call.attend

    def wrong(call, **options):
        right(call, **options)
        call.out += 1

    monkeypatch.setattr(attention.Call, "attend", wrong)
    assert main(attention, [*ARGUMENTS, "--part", "decode", "--dtype", "float32"]) == 2
    assert "a result is wrong" in capsys.readouterr().err
