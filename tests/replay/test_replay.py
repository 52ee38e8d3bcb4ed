"""Replays at the edges: requests without an answer or without room, and options that do not fit."""

import pytest
from traces import make_trace

from benchmarks.replay import replay, synthetic_trace
from benchmarks.replay.shapes import HybridShape, hybrid_shape
from kvpool.groups import Group


def test_request_of_two_billion_tokens_is_rejected_at_once():
    """Nobody makes room for its tokens."""
    result = replay(make_trace([(2**31 - 1, 2**31 - 1, []), (4, 1, [7])]), num_blocks=2, concurrency=4)
    assert (result.counters["rejected"], result.counters["finished"]) == (1, 1)


def test_request_without_answer_gives_one_token():
    result = replay(make_trace([(5, 0, [0, 1])]), num_blocks=4, concurrency=1)
    assert (result.counters["finished"], result.counters["decode_tokens"]) == (1, 1)


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
