"""``python -m benchmarks.hybrid``: the simulated policies on cases worked out by hand, the gates, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.command import main
from benchmarks.hybrid import command, measure, peers
from benchmarks.hybrid.measure import PEERS, POOL, Setting
from benchmarks.replay import Trace, synthetic_trace
from benchmarks.replay.trace import paths_of, shareable_blocks, unique_blocks

SETTING = Setting("qwen3_5", "agentic_a", 1500, 4, 64)


def case_of(trace, state_nbytes=0, window=0, window_nbytes=0, concurrency=1):
    """Blocks of 16 tokens, one byte of full attention per token."""
    return peers.Case(trace, paths_of(trace, 16), 16, concurrency, 1, state_nbytes, window, window_nbytes)


def turns(*prompts):
    """Requests that continue one conversation: so many blocks, and a token that nobody else has."""
    ids = [list(range(count)) for count in prompts]
    return Trace(
        name="turns",
        block_size=16,
        prompts=np.array([16 * count + 1 for count in prompts]),
        outputs=np.ones(len(prompts), np.int64),
        ids=np.array([value for row in ids for value in row], np.int64),
        id_offsets=np.cumsum([0, *prompts]),
        timestamps=np.zeros(len(prompts), np.int64),
        sessions=np.zeros(len(prompts), np.int64),
    )


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        (peers.full_attention, 4 + 8 + 4),
        (peers.clairvoyant, 4 + 8 + 4),
        (peers.vllm(16, 3), 4 + 8 + 4),
        (peers.vllm(48, 3), 3 + 6 + 3),  # whole pages of three blocks
        (peers.every(32), 4 + 8 + 4),
        (peers.every(48), 3 + 6 + 3),
        (peers.sglang(0.5), 4 + 8 + 4),
    ],
)
def test_policies_with_enough_bytes_find_their_last_checkpoint(policy, hits):
    trace = turns(4, 8, 12, 4)
    assert policy(case_of(trace, state_nbytes=16), 10**6) == 16 * hits


@pytest.mark.parametrize(("seed", "divisor"), [(0, 2), (1, 8)])
def test_no_policy_finds_more_than_full_attention_or_the_bound(seed, divisor):
    trace = synthetic_trace(seed, sessions=24)
    case = case_of(trace, state_nbytes=64)
    nbytes = 16 * unique_blocks(case.paths) // divisor
    bound, full = peers.clairvoyant(case, nbytes), peers.full_attention(case, nbytes)
    assert full <= bound <= 16 * sum(shareable_blocks(trace, case.paths, 16))
    for policy in (peers.vllm(16, 4), peers.every(32), peers.sglang(0.25)):
        assert 0 < policy(case, nbytes) <= bound


def test_command_plays_a_folder_of_traces(capsys, tmp_path, monkeypatch):
    trace = synthetic_trace(1, sessions=48)
    lengths = np.diff(trace.id_offsets)
    np.savez(
        tmp_path / "agentic_a.npz",
        block_size=np.int32(4096),  # each id stands for so many tokens that states are worth it
        input_length=lengths * 4096 + 1,
        output_length=trace.outputs,
        run_off=trace.id_offsets,
        run_start=trace.ids,
        run_len=np.ones_like(trace.ids),
    )
    monkeypatch.setattr(measure, "SETTINGS", (replace(SETTING, block_size=1024),))
    peer = {name: policies[-1:] for name, policies in PEERS["state"].items() if name != measure.VLLM}
    monkeypatch.setitem(PEERS, "state", {measure.VLLM: (peers.vllm(1024, 3),), **peer})
    status = main(command, ["--traces", str(tmp_path), "--models", "qwen3_5", "--gates", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert status == (0 if all(gate["holds"] for gate in facts["gates"]) else 1)
    pool = {one["budget"]: one["share"] for one in facts["results"] if one["policy"] == POOL}
    assert 0 < pool["U/8"] < pool["U/2"] <= pool["U/1"] <= 1
