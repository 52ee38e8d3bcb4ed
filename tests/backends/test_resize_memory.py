"""The most memory that a resize takes, in a process of its own: the larger pool, and one layer of the smaller one."""

import importlib.util
import sys

import pytest

from benchmarks.resize import BACKENDS, HAVE, SPEC, most_nbytes, peak_of

pytestmark = [
    pytest.mark.long,  # it fills half a gigabyte
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak"),
]
NEEDS_MLX = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="no MLX")
#: Keeps what is moved out of, as a resize would that lets go of the old layers in the end.
KEEPS = """
from kvpool_backends.mlx.plain import PoolArrays
resized, kept = PoolArrays._resized, []
PoolArrays._resized = lambda self, old, *given: (kept.append(old), resized(self, old, *given))[1]
"""


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_MLX if name == "mlx" else ()) for name in BACKENDS])
@pytest.mark.parametrize(("have", "size"), [(HAVE, HAVE // 2), (HAVE // 2, HAVE)])
def test_resize_at_its_peak_holds_one_layer_twice(name, have, size):
    full, peak, after = peak_of(name, have, size)
    assert full >= 0.99 * SPEC.pool_nbytes(have)
    assert peak <= 1.02 * most_nbytes(have, size)
    assert after <= 1.02 * SPEC.pool_nbytes(size)


@NEEDS_MLX
def test_resize_that_keeps_the_old_layers_is_found():
    have, size = HAVE, HAVE // 2
    _, peak, _ = peak_of("mlx", have, size, planted=KEEPS)
    assert peak > 1.1 * most_nbytes(have, size)
