"""Replays of hybrid models: the pool gives what was worked out by hand."""

import json

import pytest
from traces import make_trace, output

from benchmarks.replay import replay, synthetic_trace
from benchmarks.replay.shapes import MODELS, HybridShape, hybrid_shape
from benchmarks.replay.trace import paths_of, shareable_blocks, unique_blocks
from kvpool.groups import Group

MIB = 2**20
COMMAND = ("--synthetic", "--sessions", "48", "--concurrency", "4", "--groups", "qwen3_5")


def shape_of(*groups, block_size=4):
    """Groups in blocks of 10 bytes."""
    return HybridShape((), block_size, 10, groups)


@pytest.mark.parametrize(
    ("model", "token_kib", "state_mib", "tail_mib", "groups"),
    [
        ("qwen3_5", 64, 146.8125, 0, (Group.full(block_size=16), Group.state(8, blocks=147))),
        ("gemma4", 80, 0, 800, (Group.window(1024, block_size=16, columns=5), Group.full(block_size=32))),
        ("gpt_oss", 24, 0, 3, (Group.window(128, block_size=16), Group.full(block_size=16))),
    ],
)
def test_shapes_of_named_models_have_the_bytes_worked_out_by_hand(model, token_kib, state_mib, tail_mib, groups):
    shape = hybrid_shape(model, 16, 4)
    assert shape.token_nbytes == token_kib * 1024
    assert (shape.state_nbytes, shape.tail_nbytes) == (state_mib * MIB, tail_mib * MIB)
    assert shape.groups == groups


def test_replay_with_few_slots_for_states_waits_for_one():
    trace, groups = synthetic_trace(1, 6, 16), [Group.full(), Group.state(2, blocks=3)]
    found = replay(trace, shape=shape_of(*groups, block_size=16), num_blocks=400, concurrency=8).counters
    assert found["finished"] == len(trace) and found["peak_running"] <= 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_entries_of_a_shape_idle_at_most_one_byte_in_twenty(model, block_size):
    shape = hybrid_shape(model, block_size, 4)
    kept = [layers for layers in shape.layers if layers.kind != "state"]
    for index, layers in enumerate(kept):
        held = shape.entry_blocks(index) * shape.block_nbytes
        needed = layers.token_nbytes * shape.entry_tokens(index)
        assert 0.95 * held <= needed <= held


def test_paths_agree_exactly_where_prompts_do():
    trace = make_trace([(10, 1, [0, 1]), (12, 1, [0, 1, 2]), (8, 1, [0, 3]), (4, 1, [1])])
    first, second, third, fourth = paths_of(trace, 2)
    assert first[:4] == second[:4] and first[4] not in second
    assert first[:2] == third[:2] and not set(third[2:]) & set(second)
    assert not set(fourth) & {*first, *second, *third}  # the same id below another prefix
    assert [len(path) for path in (first, second, third, fourth)] == [5, 6, 4, 2]
    assert shareable_blocks(trace, [first, second, third, fourth], 2) == [0, 4, 2, 0]
    assert unique_blocks([first, second, third, fourth]) == 5 + 2 + 2 + 2


def test_second_turn_begins_at_the_checkpoint_of_the_first():
    trace = make_trace([(14, 2, [0, 1, 2]), (22, 2, [0, 1, 2, 3, 4])])
    shape = shape_of(Group.full(), Group.state(2, blocks=30))
    counted = replay(trace, shape=shape, num_blocks=100, concurrency=1).counters
    assert (counted["hit_tokens"], counted["computed_tokens"]) == (12, 14 + 10)
    assert (counted["shareable_tokens"], counted["avoidable_tokens"]) == (12, 0)
    assert (counted["checkpoints_wanted"], counted["checkpoints_taken"], counted["checkpoint_hits"]) == (2, 2, 1)
    assert counted["written_nbytes"] == {"full": (4 + 3) * 10, "state": 60 * 10}


def test_command_says_what_the_replay_counted(capsys):
    facts = json.loads(output(capsys, *COMMAND, "--num-blocks", "6000", "--json"))
    (run,) = facts["runs"]
    shape = hybrid_shape("qwen3_5", 16, 4)
    expected = replay(synthetic_trace(1, 48), shape=shape, num_blocks=6000, concurrency=4)
    assert expected.counters.items() <= run.items()
    assert run["nbytes"] == 6000 * MIB
    assert facts["model"]["checkpoint_nbytes"] == shape.checkpoint_nbytes
    text = output(capsys, *COMMAND, "--num-blocks", "6000")
    for number in ("hit_tokens", "computed_tokens", "checkpoints_taken", "checkpoint_hits"):
        assert f"{run[number]:,}" in text


def test_command_sweeps_budgets_in_bytes(capsys):
    sweep = ("--sweep", "2GiB,8000,32GiB")
    runs = json.loads(output(capsys, *COMMAND, *sweep, "--json"))["runs"]
    assert [run["num_blocks"] for run in runs] == [2048, 8000, 32768]
    assert runs[0]["hit_tokens"] < runs[1]["hit_tokens"] < runs[2]["hit_tokens"]
    assert f"{runs[2]['hit_tokens']:,}" in output(capsys, *COMMAND, *sweep)
