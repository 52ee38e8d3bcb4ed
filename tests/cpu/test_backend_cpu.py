"""`CPUBackend`: the conformance kit with every instruction set, where its memory lies, what it takes and gives."""

from functools import partial

import numpy as np
import pytest

from kvpool.config import LAYOUTS, KVSpec
from kvpool.protocol import BatchShape, StepArrays
from kvpool.testing import conformance
from kvpool.testing.dense import dense_attention
from kvpool.testing.filled import SEED
from kvpool_backends.cpu import CPUBackend, default_layout, isas
from kvpool_backends.cpu._kernels import tilings
from kvpool_backends.numpy import NumpyBackend


@pytest.mark.parametrize("isa", [*(pytest.param(isa, marks=pytest.mark.long) for isa in isas()[:-1]), isas()[-1]])
@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_backend_conforms(case, isa):
    left_out = {"attention_weights_are_returned", "refused_specs_raise", "scores_come_after_weights"}
    expected = "not applicable" if case.__name__ in left_out else "passed"
    assert conformance.check_backend(partial(CPUBackend, isa=isa), [case]) == {case.__name__: expected}


@pytest.mark.parametrize("isa", isas())
def test_spec_without_a_layout_gets_that_of_the_instruction_set(isa):
    layout = tilings()[isa]["layout"]
    backend = CPUBackend(KVSpec(1, 2, 8), 2, isa=isa)
    assert backend.spec == KVSpec(1, 2, 8, layout=layout) and default_layout(isa) == layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_lie_in_one_mapping_that_begins_at_a_huge_page(layout):
    spec = KVSpec(3, 2, 8, "float16", 4, layout=layout)
    backend = CPUBackend(spec, 5)
    addresses = backend.store.addresses()
    sizes = [int(np.prod(shape)) * itemsize for shape, _, itemsize in spec.base_arrays(5)]
    assert sum(sizes) == spec.pool_nbytes(5)
    assert addresses[0] % 2**21 == 0 and all(address % 4096 == 0 for address in addresses)
    ends = [address + size for address, size in zip(addresses, sizes, strict=True)]
    assert all(end <= address for end, address in zip(ends, addresses[1:], strict=False))


@pytest.mark.parametrize("factory", [CPUBackend, NumpyBackend])
def test_offsets_beyond_two_to_the_31_elements_reach_the_right_block(factory):
    """Keys and values of 2^31 elements and more each; memory that is never touched costs nothing."""
    spec = KVSpec(1, 1, 1024, "float16", 16)
    num_blocks = 2**31 // (16 * 1024) + 3
    backend = factory(spec, num_blocks)
    last = num_blocks - 1
    k, v = np.random.default_rng(SEED).standard_normal((2, 16, 1, 1024)).astype(np.float16)
    plan = StepArrays(np.array([[last]]), np.array([16]), np.array([0, 1]), last * 16 + np.arange(16))
    backend.write(backend.prepare(plan), 0, k, v)
    backend.copy_blocks(np.array([[last, last - 1, 16]]))
    assert np.array_equal(backend.gather(0, [last - 1])[1], v.astype(np.float32))
    assert not backend.gather(0, [2])[0].any()  # where 32-bit offsets would wrap to
    data = backend.export_blocks([last])
    backend.zero([last - 1])
    backend.import_blocks([last - 2], data)
    assert not backend.export_blocks([last - 1]).any()
    for num_queries in (1, 12):  # decode and a chunk
        q = np.ones((num_queries, 1, 1024), np.float32)
        for block in (last, last - 2):
            where = StepArrays(np.array([[block]]), np.array([16]), np.array([0, num_queries]))
            out = backend.attend(backend.prepare(where), 0, q)
            np.testing.assert_allclose(out, dense_attention(q, k, v)[0], atol=2e-6)


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
def test_tokens_of_any_float_type_are_taken_and_results_are_float32(given):
    spec, rng = KVSpec(1, 2, 8, "float32", 4), np.random.default_rng(SEED)
    k, v, q = (rng.standard_normal((3, heads, 8)).astype(given) for heads in (2, 2, 4))
    backend = CPUBackend(spec, 3)
    plan = StepArrays(np.array([[2]]), np.array([3]), np.array([0, 3]), np.array([8, 9, 10]))
    backend.write(backend.prepare(plan), 0, k, v)
    out = backend.attend(backend.prepare(plan), 0, q)
    assert out.dtype == np.float32
    k, v, q = (x.astype(np.float32) for x in (k, v, q))
    np.testing.assert_allclose(out, dense_attention(q, k, v)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scores", [None, "mass"])
def test_warmup_takes_the_scratch_that_steps_will_need(scores):
    spec = KVSpec(2, 2, 8, "float32", 4)
    backend = CPUBackend(spec, 9)
    backend.warmup([BatchShape(2, 2, 600, 4), BatchShape(0, 0, 4, 4)], scores=scores)
    scratch = backend.store.scratch_nbytes
    plan = StepArrays(np.full((2, 600), 3), np.array([2400, 17]), np.array([0, 1, 2]), np.array([1, 2]))
    backend.write(backend.prepare(plan), 1, np.ones((2, 2, 8)), np.ones((2, 2, 8)))
    backend.attend(backend.prepare(plan), 1, np.ones((2, 4, 8)), scores=scores)
    assert backend.store.scratch_nbytes == scratch
