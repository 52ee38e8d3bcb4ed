"""simdgroup_matrix, against numpy."""

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, metal_kernel, settings, to_bfloat16

TYPES = {"float": np.float32, "half": np.float16, "bfloat": BFLOAT16}
BODY = """
    simdgroup_matrix<A, 8, 8> a;
    simdgroup_matrix<B, 8, 8> b;
    simdgroup_matrix<float, 8, 8> c, d;
    simdgroup_load(a, x, 16, ulong2(4, 3));
    simdgroup_load(b, w, 11, ulong2(2, 1), true);
    simdgroup_load(c, z);
    simdgroup_multiply_accumulate(d, a, b, c);
    simdgroup_store(d, y, 8);
    simdgroup_multiply(d, a, b);
    simdgroup_store(d, y + 64, 9, ulong2(1, 2), true);
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
    x, w = narrow(random.standard_normal((11, 16)), left), narrow(random.standard_normal((10, 11)), right)
    z = random.random((8, 8))
    kernel = metal_kernel("matrix", ["x", "w", "z"], ["y"], BODY)
    with settings(unwritten="allow", instrumented=instrumented, seed=2):
        y = kernel(
            inputs=[x, w, z.astype(np.float32)], output_shapes=[(64 + 90,)], output_dtypes=[np.float32],
            template=[("A", x.dtype), ("B", w.dtype)], grid=(32, 1, 1), threadgroup=(32, 1, 1),
        )[0]  # fmt: skip
    product = wide(x)[3:11, 4:12] @ wide(w)[1:9, 2:10].T
    np.testing.assert_allclose(y[:64].reshape(8, 8), product + z, atol=1e-5)
    stored = y[64:].reshape(10, 9)
    np.testing.assert_allclose(stored[2:10, 1:9].T, product, atol=1e-5)
    assert np.isnan(stored[:2]).all() and np.isnan(stored[:, 0]).all(), "nothing else is written"


@pytest.mark.parametrize("name", TYPES)
def test_results_are_rounded_once(name):
    body = """
        simdgroup_matrix<T, 8, 8> a, b, d;
        simdgroup_load(a, x);
        simdgroup_load(b, x + 64);
        simdgroup_multiply(d, a, b);
        simdgroup_store(d, y);
    """
    x = narrow(np.random.default_rng(1).standard_normal((2, 8, 8)), name)
    y = metal_kernel("rounded", ["x"], ["y"], body)(
        inputs=[x], output_shapes=[(8, 8)], output_dtypes=[x.dtype], template=[("T", x.dtype)], grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )[0]  # fmt: skip
    tolerance = {"float": 1e-6, "half": 2**-11, "bfloat": 2**-8}[name]
    np.testing.assert_allclose(wide(y), wide(x[0]) @ wide(x[1]), rtol=tolerance, atol=1e-6)


def test_matrices_are_made_of_values():
    body = """
        simdgroup_float8x8 three(3.0f);
        simdgroup_float8x8 all = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
        all.thread_elements()[1] += thread_index_in_simdgroup;
        simdgroup_store(three, y);
        simdgroup_store(all, y + 64);
    """
    y = metal_kernel("made", [], ["y"], body)(
        inputs=[], output_shapes=[(2, 8, 8)], output_dtypes=[np.float32], grid=(32, 1, 1), threadgroup=(32, 1, 1)
    )[0]
    assert (y[0] == 3 * np.eye(8)).all(), "one value is a diagonal"
    assert (y[1, :, ::2] == 2).all()
    lanes = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    lanes += [[lane + 16 for lane in row] for row in lanes]
    assert (y[1, :, 1::2] - 2).astype(int).tolist() == lanes, "the lane that holds each pair"
