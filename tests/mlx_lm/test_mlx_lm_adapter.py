"""mlx-lm's own engines on one kvpool pool: token for token what they generate on their own caches."""

import functools
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_models import (
    PROMPTS,
    ROUTES,
    assert_all_free,
    batch_tokens,
    computing_on_cpu,
    on_cpu,
    random_prompts,
    solo_tokens,
    tiny_llama,
)

from kvpool import Pool
from kvpool.adapters.mlx_lm import Engine
from kvpool.adapters.mlx_lm import install as install_by
from kvpool.errors import CapacityExceeded

cpu = pytest.fixture(computing_on_cpu, autouse=True)


@pytest.fixture(params=ROUTES)
def install(request):
    with on_cpu():
        yield functools.partial(install_by, **ROUTES[request.param])


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(PROMPTS)


@pytest.fixture(scope="module")
def stock(model, prompts):
    """What mlx-lm generates on its own caches; varied enough to notice a difference."""
    tokens = batch_tokens(model, prompts)
    assert all(len(set(row)) > len(row) // 2 for row in tokens)
    return tokens


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_batch_generator_on_a_pool_equals_stock_and_writes_in_place(model, prompts, stock, block_size, install):
    with install(model, 400, block_size=block_size) as kv:
        assert batch_tokens(model, prompts) == stock
    summary, each = kv.summary(), kv.backend.spec.block_nbytes
    assert kv.settle() == summary.mlx_pool_copies == 0 and "0 leaked" in str(summary)
    assert summary.pool_nbytes == 400 * each
    assert summary.kv_nbytes_peak == summary.blocks_peak * each > 0
    assert_all_free(kv)


@pytest.mark.parametrize("in_order", [True, False])
def test_batch_generator_on_a_pool_of_the_users_own_equals_stock(model, prompts, stock, in_order, install):
    pool = Pool(200, 4, in_order=in_order, reserved_blocks=2)
    with install(model, pool=pool) as kv:
        assert batch_tokens(model, prompts) == stock
    assert kv.pool is pool
    assert_all_free(kv)


def modules_called(step, steps):
    """Return the module of kvpool of each Python function that so many steps call."""
    calls = []

    def note(frame, event, argument):
        if event == "call" and frame.f_globals["__name__"].startswith("kvpool"):
            calls.append(frame.f_globals["__name__"])

    sys.setprofile(note)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_decode_step_takes_one_short_way_through_the_adapter(model, prompts):
    """With three layers; what they share is asked for once. In the engine scheduler and sampler are included."""
    with install_by(model, 200, block_size=16, fused=True), Engine(model, 200, fused=True) as engine:
        generator = BatchGenerator(model, stop_tokens=[])
        generator.insert(prompts[:1], max_tokens=[60])
        engine.submit(prompts[0], max_tokens=60)
        for step, calls_max, modules_max in ((generator.next, 60, 5), (engine.step, 70, 10)):
            for _ in range(5):
                step()
            calls = modules_called(step, 10)
            assert 3 * 10 <= len(calls) <= calls_max * 10
            assert len(set(calls)) <= modules_max


def test_a_removed_request_can_go_on_from_its_returned_cache(model, prompts, stock, install):
    caches = {}

    def remove_one(generator, uids):
        steps.append(1)
        if len(steps) == 8:
            caches.update(generator.remove([uids[1]], return_prompt_caches=True))

    steps = []
    with install(model, 200, block_size=4) as kv:
        first = batch_tokens(model, prompts[:4], on_step=remove_one)[1]
        ((cache, tokens),) = caches.values()
        assert tokens == prompts[1] + first and cache[0].size() == len(tokens)
        trim_prompt_cache(cache, 1)  # the last token was fed already; its logits went with the engine
        rest = 16 - len(first)
        assert solo_tokens(model, first[-1:], rest, prompt_cache=cache) == stock[1][len(first) :]
        del cache
        caches.clear()
    assert_all_free(kv)


def test_one_unmerged_cache_takes_several_equal_rows_as_stock_does(model, install):
    rows = mx.array(random_prompts([12, 12, 12]))
    own, paged = make_prompt_cache(model), install(model, 64, block_size=4).make_cache()
    for columns in (slice(0, 7), slice(7, 11), slice(11, 12)):
        expected = model(rows[:, columns], cache=own)
        assert mx.allclose(model(rows[:, columns], cache=paged), expected, atol=1e-4)
        assert paged[0].offset == own[0].offset


# ---------------------------------------------------------------------------------------- out of blocks


def test_a_sequence_longer_than_the_whole_pool_is_distinguished_from_a_full_pool(model):
    kv = install_by(model, 8, block_size=4)
    with pytest.raises(CapacityExceeded):
        model(mx.zeros((1, 29), mx.int32), cache=kv.make_cache())
    assert not kv.can_admit(29, 0)


def test_can_admit_counts_whole_blocks_and_one_for_a_shared_tail(model):
    kv = install_by(model, 11, block_size=4)  # 10 usable
    assert kv.can_admit(20, 16)  # 9 blocks, and one
    assert not kv.can_admit(20, 17)
    assert kv.can_admit(8, 4, running=[(3, 12), (4, 5)])  # 3 + 1, 2 + 1, 1 + 1
    assert not kv.can_admit(8, 9, running=[(3, 12), (4, 5)])


# --------------------------------------------------------------------------------------------- the hook


def test_the_hook_puts_back_what_the_instance_had():
    model = tiny_llama(num_hidden_layers=1)
    model.make_cache = mine = lambda: [KVCache()]
    with install_by(model, 16):
        assert model.make_cache is not mine
    assert model.make_cache is mine


def test_release_of_mlx_lm_that_is_unknown_is_warned_of(model, monkeypatch, caplog):
    assert install_by(model, 16).route == "fused" and not caplog.records
    monkeypatch.setattr(mlx_lm, "__version__", "0.99.0")
    assert install_by(model, 16).route == "fused"
    (record,) = caplog.records
    assert record.getMessage() == "[install] mlx-lm 0.99.0 is installed, tested with >= 0.32, < 0.33"


def test_mlx_lm_whose_caches_lack_a_call_is_refused_in_a_sentence(model, monkeypatch):
    monkeypatch.delattr(KVCache, "keys_and_values", raising=False)  # those of 0.31.3 have none
    with pytest.raises(RuntimeError, match=r"^\[install\] mlx-lm 0\.\S+ has caches without keys_and_values: install"):
        install_by(model, 16)


@pytest.mark.parametrize(("used", "dtype"), [(1, mx.float32), (0, mx.float16)], ids=["one never used", "two dtypes"])
def test_layers_that_do_not_use_their_cache_as_keys_and_values_are_held_whole(used, dtype):
    class Odd:
        def make_cache(self):
            return [KVCache() for _ in range(1 + used)]

        def __call__(self, tokens, cache):
            x = mx.zeros((1, 2, tokens.shape[1], 8))
            cache[used].update_and_fetch(x, x.astype(dtype))

    assert install_by(Odd(), 16).route.endswith("; opaque: KVCache")


def test_probing_a_model_that_gathers_computes_nothing_and_leaves_it_as_it_is(model):
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    kv = install_by(model, 2, fused=False)
    assert mx.get_peak_memory() - active <= kv.backend.spec.pool_nbytes(2) + 4096
    assert kv.backend.spec.num_layers == 3 and kv.passes.windows == (None,) * 3
