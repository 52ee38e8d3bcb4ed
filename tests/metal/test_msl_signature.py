"""The stand-in for mx.fast.metal_kernel: its text is MLX's own, its arguments are checked and bound as MLX's are.

MLX builds the text of a kernel without Metal too, when a function is exported, and prints it if asked to.
"""

import contextlib
import inspect

import mlx.core as mx
import numpy as np
import pytest
from msl import MetalError, metal_kernel, settings

BODY = "uint i = thread_position_in_grid.x;\ny[i] = T(x[i]);"
CASES = {
    "seven elements are constant": {"source": BODY, "inputs": [mx.zeros(7)]},
    "eight elements are device memory": {"source": BODY, "inputs": [mx.zeros(8)]},
    "a scalar is a reference": {"source": "y[0] = T(x);", "inputs": [mx.array(2.0)]},
    "Python scalars": {"names": "abc", "source": "y[0] = a + b + c;", "inputs": [2.5, 3, True]},
    "shape, strides and ndim": {"source": f"{BODY} x_shape[0]; x_strides[0]; x_ndim;", "inputs": [mx.zeros((3, 5))]},
    "a name that ends another": {
        "names": ["x", "ax"],
        "source": "y[0] = ax_shape[0] + ax[0];",
        "inputs": [mx.zeros(9), mx.zeros(9)],
    },
    "two outputs and no built-in": {"outputs": ["y", "z"], "source": "y[0] = z[0] = x[0];"},
    "the list that MLX cuts short": {"outputs": ["y", "z"], "source": "y[0] = z[0] = x[0] + x_shape[0];"},
    "a template": {
        "source": BODY,
        "template": [("T", mx.bfloat16), ("N", -3), ("flag", True), ("off", False), ("U", mx.uint8)],
    },
    "a header": {"source": BODY, "header": "// a header\nconstant int two = 2;\n"},
    "every built-in that kernels here name": {
        "source": "simdgroup_index_in_threadgroup thread_index_in_simdgroup thread_index_in_threadgroup"
        " thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid"
        " threads_per_grid threads_per_threadgroup"
    },
} | {
    f"input and output of {dtype}": {"source": BODY, "inputs": [mx.zeros(9, dtype)], "dtype": dtype}
    for dtype in (mx.bool_, mx.uint8, mx.int64, mx.bfloat16)
}


def arguments_of(case):
    """Return the factory's and the call's arguments of a case."""
    inputs, outputs = case.get("inputs", [mx.zeros((2, 9))]), case.get("outputs", ["y"])
    factory = {
        "name": "case",
        "input_names": list(case.get("names", ["x", "w", "u"][: len(inputs)])),
        "output_names": outputs,
        "source": case["source"],
        "header": case.get("header", ""),
        **case.get("options", {}),
    }
    call = {
        "inputs": inputs,
        "output_shapes": [(9,)] * len(outputs),
        "output_dtypes": [case.get("dtype", mx.float32)] * len(outputs),
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "template": case.get("template"),
        "verbose": True,
    }
    return factory, call


def text_of_mlx(case, capfd, folder):
    factory, call = arguments_of(case)
    kernel = mx.fast.metal_kernel(**factory)
    arrays = [x for x in call["inputs"] if isinstance(x, mx.array)]

    def traced(*given):
        left = iter(given)
        inputs = [next(left) if isinstance(x, mx.array) else x for x in call["inputs"]]
        return kernel(**{**call, "inputs": inputs})

    capfd.readouterr()
    mx.export_function(str(folder / "case.mlxfn"), traced, *arrays)
    return capfd.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_generated_text_is_that_of_mlx(name, capfd, tmp_path):
    expected = text_of_mlx(CASES[name], capfd, tmp_path)
    assert "[[kernel]] void custom_kernel_case_" in expected
    factory, call = arguments_of(CASES[name])
    with contextlib.suppress(MetalError):  # most of these bodies are no programs
        metal_kernel(**factory)(**call)
    assert capfd.readouterr().out == expected


def test_arguments_are_those_of_mlx():
    given = mx.fast.metal_kernel.__doc__.split("(", 1)[1].split(") ->")[0]
    names = [part.split(":")[0].strip() for part in given.split(", ") if ":" in part]
    assert list(inspect.signature(metal_kernel).parameters) == names


KERNEL = {"name": "k", "input_names": ["x"], "output_names": ["y"], "source": "y[0] = x[x_strides[0] * 11];"}
CALL = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}


def test_inputs_are_made_row_contiguous_by_default():
    x = np.arange(24, dtype=np.float32)[::2]
    for options in ({}, {"ensure_row_contiguous": False}):  # a copy, of stride 1; or the array itself, of stride 2
        assert metal_kernel(**KERNEL, **options)(**CALL | {"inputs": [x]})[0].item() == 22
    short = metal_kernel(**KERNEL | {"source": "y[0] = x[23];"}, ensure_row_contiguous=False)
    with (  # the memory of a strided input ends with its last element
        pytest.raises(MetalError, match=r"out-of-bounds read.*'x' \(92 bytes\) at byte offset 92"),
        settings(instrumented=True),
    ):
        short(**CALL | {"inputs": [x]})
