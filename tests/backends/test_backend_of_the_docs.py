"""The example of docs/backends.md: it passes the kit, and so it serves the mlx-lm adapter."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvpool import Plan, Pool
from kvpool.spec import KVSpec
from kvpool.testing import conformance

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()


@pytest.fixture(scope="module")
def backend_class():
    (text,) = re.findall(r"```python\n(import numpy.*?)```", PAGE, re.DOTALL)
    namespace = {}
    exec(text, namespace)
    return namespace["SmallBackend"]


@pytest.mark.long
def test_the_example_passes_the_kit(backend_class):
    outcome = conformance.check_backend(backend_class)
    assert set(outcome.values()) == {"passed", "not applicable"} and outcome["contexts_are_read"] == "passed"


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_generates_on_the_example_what_it_does_on_the_built_in_backend(backend_class, fused):
    pytest.importorskip("mlx_lm")
    from mlx_models import batch_tokens, on_cpu

    from kvpool.adapters.mlx_lm import Engine, install, tiny

    with on_cpu():
        model, _ = tiny.make()
        prompts = [list(range(40, 60)), [7, 3, 9], list(range(90, 101))]
        with install(model, 64, block_size=8, fused=fused) as kv:
            assert kv.passes.is_fused == fused
            expected = batch_tokens(model, prompts, 12)
        with install(model, 64, block_size=8, fused=fused, backend=backend_class) as kv:
            assert kv.passes.is_fused == fused and kv.backend.capabilities.name == "small"
            assert batch_tokens(model, prompts, 12) == expected
            assert kv.summary().blocks_used == 0 and kv.settle() == 0
        if fused:
            with Engine(model, 64, block_size=8, backend=backend_class) as engine:
                answers = engine.batch(prompts, max_tokens=12)
            assert [answer.tokens.tolist() for answer in answers] == expected


def test_options_of_the_mlx_backend_are_refused_beside_another_one(backend_class):
    pytest.importorskip("mlx_lm")
    from kvpool.adapters.mlx_lm import install, tiny

    model, _ = tiny.make()
    with pytest.raises(TypeError, match="kernels belongs to the mlx backend"):
        install(model, 8, backend=backend_class, kernels=True)


def test_a_plan_takes_the_formats_of_a_backend_and_refuses_other_sizes(backend_class):
    with Pool(6, 8) as pool:
        plan = Plan(pool, 2, formats=("csr",), backend=backend_class(KVSpec(1, 1, 8, "float32", block_size=8), 6))
        pool.step(plan, [pool.open()], [1])
        assert plan.cu_q_lens.tolist() == [0, 1] and plan.indptr.tolist() == [0, 1]
        assert np.array_equal(plan.block_tables[:, :1], [[1]])
        with pytest.raises(ValueError, match=r"\[Plan\] block_size is 16 in the backend, 8 in the pool"):
            Plan(pool, 2, backend=backend_class(KVSpec(1, 1, 8, "float32", block_size=16), 6))
        with pytest.raises(ValueError, match=r"\[Plan\] num_blocks is 5 in the backend, 6 in the pool"):
            Plan(pool, 2, backend=backend_class(KVSpec(1, 1, 8, "float32", block_size=8), 5))
