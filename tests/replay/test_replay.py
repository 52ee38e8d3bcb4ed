"""Replayed traces give the golden numbers: every counter, and the digest of what happened in which order.

The numbers come from `simulator`, which plays the rules of rules_full.md. The synthetic trace needs no file, so its
part always runs. ``KVPOOL_TRACES`` names a folder with the other traces; ``KVPOOL_REPLAY_FULL=1`` adds the full traces
(`make test-golden-full`, minutes).
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import simulator
from traces import make_trace

from benchmarks.replay import read_trace, replay, synthetic_trace
from benchmarks.replay.shapes import HybridShape, hybrid_shape
from kvpool.groups import Group

SYNTH = json.loads((Path(__file__).parents[1] / "data" / "golden_synth.json").read_text())["results"]
RECORDED = json.loads(Path(__file__).with_name("golden_traces.json").read_text())["results"]
TRACES = os.environ.get("KVPOOL_TRACES")
IS_FULL = os.environ.get("KVPOOL_REPLAY_FULL", "0") not in ("", "0")
PARAMETERS = {"trace", "seed", "sessions", "rows", "trace_sha256", "N", "b", "C", "limit"}


def golden_entries():
    """The entries as test parameters; one that is skipped when there is no folder of traces."""
    if TRACES is None:
        reason = "KVPOOL_TRACES is not set: it names the folder with the traces"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="no-traces")]
    entries = [entry for entry in RECORDED if IS_FULL or entry["trace"].startswith("tiny")]
    return [pytest.param(entry, id=entry_id(entry)) for entry in entries]


def entry_id(entry):
    names = ("trace", "seed", "sessions", "N", "b", "C", "limit")
    return "-".join(f"{name}{entry[name]}" for name in names if entry.get(name) is not None)


def trace_of(entry):
    """The trace of a golden entry, from its file."""
    name = entry["trace"] if "." in entry["trace"] else f"{entry['trace']}.jsonl"
    trace = read_trace(Path(TRACES) / name)
    return trace if entry["limit"] is None else trace.head(entry["limit"])


def check_counters(entry, trace):
    """Replay, and compare every number of a golden entry."""
    result = replay(trace, num_blocks=entry.get("N"), block_size=entry["b"], concurrency=entry["C"])
    assert result.counters == {name: value for name, value in entry.items() if name not in PARAMETERS}


def check_simulator(entry, rows, width):
    """The simulator has the same numbers."""
    assert simulator.simulate(rows, width, entry).items() <= entry.items()


def rows_digest(trace):
    columns = (trace.timestamps, trace.sessions, trace.prompts, trace.outputs)
    lines = zip(*(column.tolist() for column in columns), strict=True)
    rows = [[*line, trace.ids_of(row).tolist()] for row, line in enumerate(lines)]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@pytest.mark.parametrize("entry", SYNTH, ids=entry_id)
def test_synthetic_trace_gives_the_golden_numbers(entry):
    trace = synthetic_trace(entry["seed"], entry["sessions"], 16)
    assert len(trace) == entry["rows"]
    assert rows_digest(trace) == entry["trace_sha256"]
    check_counters(entry, trace)
    check_simulator(entry, simulator.rows_of(trace), 16)


@pytest.mark.parametrize("entry", golden_entries())
def test_recorded_traces_give_the_golden_numbers(entry):
    check_counters(entry, trace_of(entry))
    check_simulator(entry, *simulator.read_rows(Path(TRACES) / entry["trace"], entry["limit"]))


def test_request_of_two_billion_tokens_is_rejected_at_once():
    """Nobody makes room for its tokens."""
    result = replay(make_trace([(2**31 - 1, 2**31 - 1, []), (4, 1, [7])]), num_blocks=2, concurrency=4)
    assert (result.counters["rejected"], result.counters["finished"]) == (1, 1)


def test_request_without_answer_gives_one_token():
    result = replay(make_trace([(5, 0, [0, 1])]), num_blocks=4, concurrency=1)
    assert (result.counters["finished"], result.counters["decode_tokens"]) == (1, 1)


def test_utilization_counts_tokens_against_positions_held():
    """Prompt 5, two tokens, blocks of 4: the end of step 1 sees 6 of 8 positions filled, that of step 2 nothing."""
    occupancy = replay(make_trace([(5, 2, [0, 1])]), num_blocks=4, concurrency=1).occupancy
    assert (occupancy.steps, occupancy.used_block_steps, occupancy.token_steps) == (2, 2, 6)
    assert occupancy.mean_utilization == occupancy.peak_utilization == 6 / 8
    assert occupancy.mean_static_utilization == 6 / 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trace": synthetic_trace().head(0), "num_blocks": 4}, "no request"),
        ({"shape": hybrid_shape("qwen3_5", 4, 1)}, "num_blocks"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 4, "block_size": 2, "shape": hybrid_shape("qwen3_5", 4, 1)}, "block_size is 2"),
        ({"num_blocks": 4, "concurrency": 0}, "concurrency"),
        ({"num_blocks": 4, "block_size": 0}, "block_size"),
        ({"num_blocks": 0, "shape": hybrid_shape("qwen3_5", 4, 1)}, "num_blocks"),
        (
            {"num_blocks": 9, "shape": HybridShape((), 3, 10, (Group.full(), Group.state(2, blocks=3)))},
            "multiples of 3",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=rf"^\[replay\] .*{said}"):
        replay(**{"trace": make_trace([(8, 8, [0, 1])])} | options)
