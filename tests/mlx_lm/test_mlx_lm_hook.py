"""Several installs on one model leave in any order, and the last one leaves the model as it was."""

import copy
import itertools
import math
import sys

import mlx.core as mx
import pytest
from mlx_families import FAMILIES
from mlx_lm import server
from mlx_lm.models import gemma2
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_models import computing_on_cpu, tiny_llama

from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.hooks import Site

cpu = pytest.fixture(computing_on_cpu, autouse=True)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=1)


def maker(model):
    """Whose caches the model hands out, None for stock ones."""
    cache = make_prompt_cache(model)[0]
    return None if type(cache) is KVCache else cache.batch.passes


def test_installs_leave_in_any_order(model):
    """Three on one model, whose newest makes its caches, and one on a model whose file has a hook of its own, too."""
    stock, call = mx.fast.scaled_dot_product_attention, gemma2.Attention.__call__
    installed = [install(one, 8, fused=True) for one in (model, model, model, FAMILIES["gemma2"]())]
    for order in itertools.permutations(range(4)):
        for kv in installed:
            kv.__enter__()
        left = set(range(4))
        for i in order:
            assert maker(model) is (installed[max(left - {3})].passes if left - {3} else None), order
            installed[i].__exit__(None, None, None)
            left.discard(i)
            assert [kv.passes.is_fused for kv in installed] == [j in left for j in range(4)], order
            assert (mx.fast.scaled_dot_product_attention is stock) == (not left), order
            assert (gemma2.Attention.__call__ is call) == (3 not in left), order
        assert "make_cache" not in vars(model), order


def test_one_install_may_be_entered_twice(model):
    first, second = install(model, 8), install(model, 8)
    with first, second:
        with first:
            assert maker(model) is first.passes
        assert maker(model) is second.passes
    assert maker(model) is None


def test_foreign_hook_is_kept(model):
    kv = install(model, 8)
    with kv:
        paged = model.make_cache
        model.make_cache = mine = lambda: paged()
        with pytest.raises(RuntimeError, match=r"\[install\] model\.make_cache is .*put back what was there"):
            kv.__exit__(None, None, None)
        assert model.make_cache is mine and kv.route.startswith("lost: somebody has set model.make_cache to ")
        model.make_cache = paged
        assert kv.route == "fused"
    assert maker(model) is None


def test_exit_without_enter_raises(model):
    kv, other = install(model, 8), install(model, 8)
    with kv:
        with pytest.raises(RuntimeError, match=r"\[install\]"):
            other.__exit__(None, None, None)
        assert maker(model) is kv.passes
    with pytest.raises(RuntimeError, match=r"\[install\]"):
        kv.__exit__(None, None, None)
    assert maker(model) is None


def test_deep_copy_of_an_installed_model_raises(model):
    with install(model, 8) as kv:
        with pytest.raises(TypeError, match=r"\[install\] a model cannot be copied inside the block"):
            copy.deepcopy(model)
        assert maker(model) is kv.passes
    assert maker(copy.deepcopy(model)) is None


def test_deleted_hook_shows_in_the_route_and_at_the_end_of_every_block(model):
    """One hook stands for both; what was installed since has a hook of its own, which goes on."""
    outer, inner, later = (install(model, 8) for _ in range(3))
    outer.__enter__()
    inner.__enter__()
    assert inner.route == inner.summary().route == "fused"
    del model.make_cache
    assert inner.route == inner.summary().route == "lost: somebody has deleted model.make_cache"
    assert maker(model) is None
    with later:
        assert maker(model) is later.passes
        assert inner.route.startswith("lost: somebody has set model.make_cache to ") and later.route == "fused"
    for kv in (inner, outer):
        with pytest.raises(RuntimeError, match=r"\[install\] somebody has deleted model\.make_cache inside the block"):
            kv.__exit__(None, None, None)
    assert "make_cache" not in vars(model) and not any(site.is_active for site in outer.passes.sites)


@pytest.mark.parametrize("failing", range(3))
def test_block_that_cannot_be_entered_leaves_nothing_behind(model, failing, monkeypatch):
    """Whichever of the stand-ins cannot be put: two of attention, and that of mlx-lm's server."""
    kv, handler, put, left = install(model, 8), vars(server.APIHandler)["handle_completion"], Site.enter, []
    kv.passes.sites = (*kv.passes.sites, Site(math, "sqrt", lambda original: abs))

    def enter(site):
        if len(left) == failing:
            raise ZeroDivisionError
        left.append(site)
        put(site)

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Site, "enter", enter)
            kv.__enter__()
        assert maker(model) is None and "make_cache" not in vars(model) and math.sqrt(4.0) == 2
        assert not any(site.is_active for site in kv.passes.sites)
        assert vars(server.APIHandler)["handle_completion"] is handler
        left.clear()
    with kv:
        assert maker(model) is kv.passes and math.sqrt(4.0) == 4 and kv.route == "fused"
        assert vars(server.APIHandler)["handle_completion"] is not handler
    assert math.sqrt(4.0) == 2 and vars(server.APIHandler)["handle_completion"] is handler


@pytest.mark.parametrize("missing", ["module", "attribute"])
def test_release_that_has_its_server_elsewhere_can_be_installed_on(model, missing, monkeypatch):
    if missing == "module":
        monkeypatch.setitem(sys.modules, "mlx_lm.server", None)
    else:
        monkeypatch.delattr(server.APIHandler, "handle_completion")
    with install(model, 8) as kv:
        assert maker(model) is kv.passes
    assert maker(model) is None


def test_paged_kv_says_what_it_is(model):
    with install(model, 8) as kv:
        assert repr(kv) == f"<PagedKV of 1 layers on {kv.pool!r}, route fused>"


def test_model_whose_caches_change_class_is_refused_and_left_alone():
    """A window at every second call: nobody can say which cache the next sequence has."""
    model, made = tiny_llama(num_hidden_layers=2), itertools.count()

    def make_cache():
        return [KVCache(), RotatingKVCache(8) if next(made) % 2 else KVCache()]

    model.make_cache = make_cache
    with pytest.raises(ValueError, match=r"^\[install\] cache 1 of the model is a KVCache, and a RotatingKVCache when"):
        install(model, 8)
    assert model.make_cache is make_cache
