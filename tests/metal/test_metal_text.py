"""The texts of the Metal kernels: names, 64-bit offsets, what MLX and Apple's compiler ask of a text."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import FEATURES, Batch
from metal_engine import StandIn
from test_metal_moves import Planes, copy_blocks, write

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import (
    INPUTS,
    MetalKernels,
    content_hash,
    in_place_source,
    source_text,
)

FILES = [path for path in (Path(__file__).parents[2] / "metal").iterdir() if path.suffix in (".metal", ".h")]
BODIES = tuple(INPUTS)


def described(spec=None):
    """What the factory is told about each kernel, by name."""
    kernels = []
    made = MetalKernels(spec or KVSpec(1, 2, 64), 4, lambda **description: kernels.append(description))
    for name in BODIES:
        made._kernel(name)
    return dict(zip(BODIES, kernels, strict=True))


def test_kernel_names_contain_the_hash_of_their_text():
    # MLX finds a compiled kernel by its name: a new text under an old name would run the old one.
    for name, description in described().items():
        assert description["name"] == f"kvpool_{name}_{content_hash(description['header'], description['source'])}"
    assert content_hash("a", "b") != content_hash("a", "c") != content_hash("ac")
    for name in ("kv_write", "kv_write_packed", "copy_blocks"):
        function, text = in_place_source(name, ("float16",), (16,))
        assert function.endswith(content_hash(text[: text.rindex("\ntemplate [[host_name")]))


def test_every_input_is_named_and_none_is_copied_to_be_contiguous():
    for description in described().values():
        assert description["ensure_row_contiguous"] is False
        for name in description["input_names"]:
            assert re.search(rf"\b{name}\b", description["source"])


@pytest.mark.parametrize("kernel", ["paged_attention", "paged_matrix"])
def test_variants_of_an_attention_kernel_share_one_text(kernel):
    attention = {name: told for name, told in described().items() if name.startswith(kernel)}
    assert len({told["source"] for told in attention.values()}) == 1
    (names,) = re.findall(r"enum Absent \{(.*)\};", source_text("paged_attention.h"))
    lacked = set(names.replace(" ", "").split(","))
    taken = [{*told["input_names"], *told["output_names"]} for told in attention.values()]
    assert lacked == set.union(*taken) - set.intersection(*taken)


def test_kernel_texts_have_no_comments_and_no_function_constants():
    for path in FILES:
        text = source_text(path.name)
        assert not re.search(r"^\s|\n\s", text)  # MLX copies the text at each launch
        assert "//" not in text  # a built-in value that a comment names becomes an argument
        assert "function_constant" not in text  # not part of MLX's key of a compiled kernel


def test_threadgroup_variables_have_fixed_sizes_in_kernel_bodies():
    # No threadgroup memory is sized at launch: there is no length that could fail to be a multiple of 16 bytes.
    # A pointer into it is no variable.
    numbers = {"paged_attention.metal": 3, "paged_matrix.metal": 5, "paged_reduce.metal": 2}
    for name in {path.name for path in FILES}:
        declared = re.findall(r"^threadgroup \w+ \w+\[[^\]]+\];$", source_text(name), re.MULTILINE)
        assert len(declared) == len(re.findall(r"\bthreadgroup (?!\w+\* )", source_text(name))) == numbers.get(name, 0)


@pytest.mark.parametrize("features", [(), FEATURES])
@pytest.mark.parametrize(
    "choice",
    [
        # Fewer than 8 elements in small inputs, and more
        {"dtype": "float16", "head_dim": 80, "layout": "HND", "seq_lens": (70,)},
        {"dtype": "bfloat16", "head_dim": 256, "seq_lens": (70,) * 9, "group": 8},
        {"dtype": "float32", "head_dim": 192, "v_head_dim": 128, "seq_lens": (70, 3), "q_lens": (3, 2)},
        {"dtype": "bfloat16", "k_bits": 8, "v_bits": 4, "seq_lens": (70,)},
    ],
)
def test_metal_would_take_the_texts_of_attention(choice, features):
    """As far as clang's address spaces and a list of words can tell; without clang, the words alone."""
    for part_tokens in (32, 512):
        batch = Batch(features=features, part_tokens=part_tokens, **choice)
        batch.check(batch.run_with_scores(StandIn().factory(0, lint=True), "raw")[0])


def test_metal_would_take_the_texts_of_what_moves():
    for rows in (1, 9):
        batch = Batch(seq_lens=(9,) * rows)
        kernels = MetalKernels(batch.spec, batch.num_blocks, StandIn().factory(0, lint=True))
        kernels.gather(0, "v", batch.pools[1], mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32), 9)
    for spec in (KVSpec(1, 2, 64, "float16", 8), KVSpec(1, 2, 64, "float16", 8, k_bits=8)):
        planes = Planes(spec)
        for vectors in (False, True):
            write(planes, [np.zeros((1, 2, 64))] * 2, "bfloat16", [3], vectors, lint=True)
        copy_blocks(planes, "k", [[0, 1, 3]], lint=True)
    MetalKernels(spec, 4, StandIn().factory(0, lint=True)).packed("k", mx.zeros((1, 2, 64)))


@pytest.mark.parametrize("size", [4, 8])  # on both sides of MLX's limit for the constant address space
def test_offsets_are_64_bit(engine, size):
    cases = [
        (0, 2**20, 2**14, 3, 128, 1, 64),  # block * stride beyond 32 bits
        (5, 70_000, 65_536, 7, 4096, 31, 128),
        (-(2**40), 2**31 - 1, 2**12, 2**20, 2**13, 2**16, 2**17),
        (0, 1, 2**33, 1, 2**34, 1, 2**35),  # strides beyond 32 bits
    ]
    kernel = engine.factory(0)(
        name=f"offsets_{size}",
        input_names=["layout", "place"],
        output_names=["out"],
        header=source_text("kv_layout.h"),
        source="out[thread_position_in_grid.x] = kv::head_of(layout, place[2]).row(place[0], place[1]);",
    )
    for offset, block, block_stride, slot, slot_stride, head, head_stride in cases:
        layout = np.zeros(size, np.int64)
        layout[:4] = offset, block_stride, slot_stride, head_stride
        (out,) = kernel(
            inputs=[mx.array(layout), mx.array(np.array([block, slot, head], np.int32))],
            output_shapes=[(1,)],
            output_dtypes=[mx.int64],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        expected = offset + block * block_stride + slot * slot_stride + head * head_stride
        assert out.item() == expected
