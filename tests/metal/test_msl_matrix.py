"""simdgroup_matrix, against numpy."""

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, metal_kernel, settings, to_bfloat16

TYPES = {"float": np.float32, "half": np.float16, "bfloat": BFLOAT16}
BODY = """
    simdgroup_matrix<A, 8, 8> a;
    simdgroup_matrix<B, 8, 8> b;
    simdgroup_matrix<float, 8, 8> c, d;
    simdgroup_load(a, x + 3 * 16 + 4, 16);
    simdgroup_load(b, w);
    simdgroup_load(c, z);
    simdgroup_multiply_accumulate(d, a, b, c);
    simdgroup_store(d, y + 9, 9);
"""


def narrow(values, name):
    return to_bfloat16(values) if name == "bfloat" else values.astype(TYPES[name])


def wide(array):
    return (from_bfloat16(array) if array.dtype == BFLOAT16 else array).astype(np.float64)


@pytest.mark.parametrize("instrumented", [False, True], ids=["plain", "instrumented"])
@pytest.mark.parametrize(
    ("left", "right"), [("float", "float"), ("half", "half"), ("bfloat", "bfloat"), ("half", "float")]
)
def test_matrices_are_loaded_multiplied_and_stored(left, right, instrumented):
    random = np.random.default_rng(0)
    x, w = narrow(random.standard_normal((11, 16)), left), narrow(random.standard_normal((8, 8)), right)
    z = random.random((8, 8))
    kernel = metal_kernel("matrix", ["x", "w", "z"], ["y"], BODY)
    with settings(allow_unwritten=True, instrumented=instrumented, seed=2):
        y = kernel(
            inputs=[x, w, z.astype(np.float32)], output_shapes=[(9, 9)], output_dtypes=[np.float32],
            template=[("A", x.dtype), ("B", w.dtype)], grid=(32, 1, 1), threadgroup=(32, 1, 1),
        )[0]  # fmt: skip
    np.testing.assert_allclose(y[1:, :8], wide(x)[3:11, 4:12] @ wide(w) + z, atol=1e-5)
    assert np.isnan(y[0]).all() and np.isnan(y[:, 8]).all(), "nothing else is written"


def test_matrices_are_made_of_values():
    body = """
        simdgroup_float8x8 all = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
        all.thread_elements()[1] += thread_index_in_simdgroup;
        simdgroup_store(all, y);
    """
    y = metal_kernel("made", [], ["y"], body)(
        inputs=[], output_shapes=[(8, 8)], output_dtypes=[np.float32], grid=(32, 1, 1), threadgroup=(32, 1, 1)
    )[0]
    assert (y[:, ::2] == 2).all()
    lanes = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    lanes += [[lane + 16 for lane in row] for row in lanes]
    assert (y[:, 1::2] - 2).astype(int).tolist() == lanes, "the lane that holds each pair"
