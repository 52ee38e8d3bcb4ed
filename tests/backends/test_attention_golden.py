"""Attention with numbers that can be checked by hand, for the oracle, to which the kit holds every backend.

Keys have one dimension and queries are 1, so the key is the score; values are unit vectors, so the result is the
weights.
"""

from math import e, log

import numpy as np
import pytest

from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention

N = float("-inf")


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        ([0, log(3)], {}, [[[1, 0]], [[1 / 4, 3 / 4]]]),
        ([0, 0, 0, 0], {"window": 1}, [[[0, 0, 0, 1]]]),
        ([0, 0, 0, 0], {"window": 3}, [[[1 / 3, 1 / 3, 1 / 3, 0]], [[0, 1 / 3, 1 / 3, 1 / 3]]]),
        ([0, 0, 0], {"window": 4}, [[[1 / 3, 1 / 3, 1 / 3]]]),
        # 2 * tanh(log(3) / 2) is 1
        ([log(3), 0], {"soft_cap": 2.0}, [[[e / (e + 1), 1 / (e + 1)]]]),
        ([0, 0], {"sinks": [log(2)]}, [[[1 / 3, 0]], [[1 / 4, 1 / 4]]]),
        ([0, 0], {"sinks": [0.0, log(6)]}, [[[1 / 3, 1 / 3], [1 / 8, 1 / 8]]]),
        ([0, 0, 0], {"alibi_slopes": [log(2)]}, [[[1 / 3, 2 / 3, 0]], [[1 / 7, 2 / 7, 4 / 7]]]),
        ([0, 0, 0], {"alibi_slopes": [0.0, -log(2)]}, [[[1 / 3, 1 / 3, 1 / 3], [4 / 7, 2 / 7, 1 / 7]]]),
        # the bias of distance 0 is 0: a sink of 0 weighs what the newest key weighs
        ([0, 0], {"alibi_slopes": [log(2)], "sinks": [0.0]}, [[[1 / 2, 0]], [[1 / 5, 2 / 5]]]),
        ([0, 0], {"mask": [[log(3), 0.0, 7.0]]}, [[[3 / 4, 1 / 4]]]),
        ([0, 0, 0], {"mask": [[True, False, True]]}, [[[1 / 2, 0, 1 / 2]]]),
        ([0, 0], {"mask": [[[N, 0.0]], [[0.0, log(4)]]]}, [[[0, 0]], [[1 / 5, 4 / 5]]]),
        ([0, 0], {"mask": [[[N, 0.0], [0.0, N], [N, N]]]}, [[[0, 1], [1, 0], [0, 0]]]),
        ([0, 0], {"mask": [[False, False]], "sinks": [5.0]}, [[[0, 0]]]),
        # neither cap, nor mask, nor window touches the sink
        (
            [9, log(3), 0],
            {"window": 2, "soft_cap": 2.0, "sinks": [log(5)], "mask": [[0.0, 0.0, log(2)]]},
            [[[0, e / (e + 2 + 5), 2 / (e + 2 + 5)]]],
        ),
    ],
)
def test_attention_of_known_scores_has_the_known_weights(scores, options, expected):
    expected = np.array(expected, float)
    arrays = {name: np.array(x) if isinstance(x, list) else x for name, x in options.items()}
    k, q = np.array(scores, np.float64)[:, None, None], np.ones((*expected.shape[:2], 1))
    out, weights = dense_attention(q, k, np.eye(len(scores))[:, None], 1.0, AttentionOptions(**arrays))
    assert np.array_equal(out, weights)
    np.testing.assert_allclose(weights, expected, rtol=2e-7, atol=1e-12)  # options are float32
