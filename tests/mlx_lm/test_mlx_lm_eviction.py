"""Eviction under mlx-lm's own engines: budgets hold, positions go on, and nobody else's tokens change.

Tokens leave the layers that keep every token. Windows and states of other layers let go by themselves. A
`SlidingWindow` is no eviction: it gives those layers a window, too, and the tokens are those of stock under its mask.
"""

import copy
import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import model_of_file
from mlx_models import (
    VOCAB,
    assert_all_free,
    batch_tokens,
    computing_on_cpu,
    on_cpu,
    random_prompts,
    solo_tokens,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_sliding_llama,
)
from sliding_cache import sliding

from kvpool import Group, Pool
from kvpool.adapters.mlx_lm import install, make_cache
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.errors import OutOfBlocks
from kvpool.eviction import H2O, BlockEviction, SlidingWindow
from kvpool_backends.numpy import NumpyBackend

cpu = pytest.fixture(computing_on_cpu, autouse=True)
WINDOW = SlidingWindow(max_kv=20, sink=3)
POLICIES = {
    "h2o": H2O(max_kv=20, kind="raw"),
    "h2o mass": H2O(max_kv=20, kind="mass", slack=5),
    "blocks": BlockEviction(max_kv=20, recent_tokens=6),
}
MAKERS = {"llama": tiny_llama, "gemma3": tiny_gemma3, "gpt_oss": tiny_gpt_oss, "sliding llama": tiny_sliding_llama}
PROMPT = random_prompts([33])[0]
family = functools.partial(model_of_file, vocab_size=VOCAB)


@pytest.fixture(scope="module", params=MAKERS)
def any_model(request):
    """With one table, or with layer groups."""
    return MAKERS[request.param]()


@pytest.fixture
def kv(model):
    with on_cpu(), install(model, 200, block_size=4, prefix_cache=True) as paged:
        yield paged
        paged.pool.check()


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def tokens(model, caches, prompt=PROMPT, n=40):
    return solo_tokens(model, prompt, n, prompt_cache=caches)


# ---- a window


@pytest.mark.parametrize("fused", [True, False])
def test_model_under_a_window_says_what_stock_says_under_its_mask(any_model, fused):
    prompts = [PROMPT, *random_prompts((5, 40), seed=3)]
    due = [tokens(any_model, sliding(any_model, WINDOW), prompt, 30) for prompt in prompts]
    assert due[0] != tokens(any_model, None, n=30)
    with install(any_model, 400, block_size=4, fused=fused, eviction=WINDOW) as kv:
        assert kv.passes.is_fused == fused
        assert tokens(any_model, kv.make_cache(), n=30) == due[0]
        for together in (1, 3):
            assert batch_tokens(any_model, prompts, 30, prefill_batch_size=together) == due
        assert_all_free(kv)


@pytest.mark.parametrize("sink", [0, 1, 4, 9])
def test_window_is_right_at_every_length_whatever_its_sinks_are(model, sink):
    """Logits of a decode after a prompt in one chunk, from before the window is full on."""
    window = SlidingWindow(max_kv=19, sink=sink)
    with install(model, 400, block_size=4, eviction=window) as kv:
        for length in range(14, 44):
            ours, stock = kv.make_cache(), sliding(model, window)
            for piece in (PROMPT * 2)[:length], [5], [7]:
                got, due = (np.array(model(mx.array([piece]), cache=caches)) for caches in (ours, stock))
                np.testing.assert_allclose(got, due, rtol=1e-3, atol=1e-4)


def test_backend_without_masks_gathers_under_a_window(model):
    class Plain(NumpyBackend):
        capabilities = replace(NumpyBackend.capabilities, features=("window",))

    with install(model, 100, block_size=4, backend=Plain, eviction=WINDOW) as kv:
        assert kv.route == "gather: the backend takes no mask"
        assert tokens(model, kv.make_cache(), n=20) == tokens(model, sliding(model, WINDOW), n=20)


@pytest.mark.parametrize("name", ["qwen3_5", "llama4", "openelm", "deepseek_v3", "deepseek_v32", "falcon_h1"])
def test_window_is_right_in_models_of_every_kind(name):
    """States, chunks, shapes, latents, caches in caches."""
    model, prompts = family(name), random_prompts((37, 9), seed=6)
    due = [tokens(model, sliding(model, WINDOW), prompt) for prompt in prompts]
    with install(model, 400, block_size=4, eviction=WINDOW) as kv:
        assert batch_tokens(model, prompts, 40, prefill_batch_size=1) == due
        assert_all_free(kv)
    with install(model, 400, block_size=4) as kv:
        assert batch_tokens(model, prompts, 40) != due


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5", "llama4"])
def test_prefix_longer_than_the_window_is_found(name):
    model = tiny_llama() if name == "llama" else family(name)
    prompt = [token % VOCAB for token in random_prompts([61], seed=4)[0]]
    due = tokens(model, sliding(model, WINDOW), prompt)
    with install(model, 400, block_size=4, prefix_cache=True, eviction=WINDOW) as kv:
        for hit in (0, 44):  # the cut, 16 tokens before the end, in whole blocks
            caches, found = kv.fetch(prompt)
            assert found == hit and tokens(model, caches, prompt[found:]) == due
            kv.commit(caches, [*prompt, *due])
        kv.pool.check()


def test_window_belongs_to_the_pool(model):
    groups = [Group.window(17, keep=3)]
    with install(model, pool=Pool(50, 4, reserved_blocks=1, groups=groups), eviction=WINDOW) as kv:
        assert tokens(model, kv.make_cache()) == tokens(model, sliding(model, WINDOW))
        with pytest.raises(TypeError, match=r"\[make_cache\] .* not SlidingWindow: a window belongs to the pool, give"):
            kv.make_cache(WINDOW)
        with pytest.raises(ValueError, match=r"\[make_cache\] H2O evicts from full attention, .* no layer that keeps"):
            kv.make_cache(POLICIES["h2o"])
    for other in ([Group.full()], [Group.window(17)], [Group.window(20, keep=3)]):
        with pytest.raises(ValueError, match=r"this model needs window\(17, keep=3\) x 1 in arena 0: leave pool out"):
            install(model, pool=Pool(50, 4, reserved_blocks=1, groups=other), eviction=WINDOW)
    with pytest.raises(ValueError, match=r"\[install\] SlidingWindow is for full attention, this model has no layer"):
        install(family("mamba2"), 40, block_size=4, eviction=WINDOW)
    with pytest.raises(ValueError, match=r"\[install\] this model takes positions from the length of its context"):
        install(family("afm7"), 40, block_size=4, eviction=WINDOW)


# ---- policies


@pytest.mark.parametrize("policy", [*POLICIES.values(), WINDOW], ids=[*POLICIES, "window"])
def test_budget_holds_in_the_full_layers_alone(any_model, policy):
    with install(any_model, 40, block_size=4, eviction=policy) as kv:
        caches, kinds = kv.make_cache(), [group.kind for group in kv.layout.groups]
        full = kinds.index("full") if policy is not WINDOW else -1
        tokens(any_model, caches, n=160)  # more than the pool has room for
        (handle,) = caches[0].batch.handles
        assert caches[0].offset == kv.pool.num_tokens(handle) == len(PROMPT) + 160 > 40 * 4
        for g, group in enumerate(kv.layout.groups):
            held = (kv.pool.table(handle, g) > 0).all(axis=1).sum()
            assert held <= -(-(policy.max_kv if g == full else group.size + kv.pool.options.lookahead) // 4) + 2
            length = kv.pool.kv_len(handle, g)
            assert length <= policy.max_kv if g == full else length == caches[0].offset
        assert not caches[0].is_trimmable()
        with pytest.raises(ValueError, match=r"\[truncate\]"):
            caches[0].trim(30)


def test_rows_of_a_batch_say_what_each_says_alone(any_model, policy):
    prompts, limits = random_prompts((33, 5, 21, 12, 40), seed=3), [20, 40, 12, 25, 8]
    with install(any_model, 400, block_size=4, eviction=policy) as kv:
        # As the engine does: all but the last token in chunks of seven, in passes of their own.
        alone = [batch_tokens(any_model, [prompt], n)[0] for prompt, n in zip(prompts, limits, strict=True)]
        assert batch_tokens(any_model, prompts, limits, prefill_batch_size=1) == alone
        kv.eviction = None
        assert batch_tokens(any_model, prompts, limits) != alone
        assert_all_free(kv)


def passes(model, caches, prompt=PROMPT, n=30):
    """Logits of each pass: the prompt in chunks of seven, then tokens that are always the same."""
    for at in range(0, len(prompt), 7):
        yield np.array(model(mx.array([prompt[at : at + 7]]), cache=caches))
    for token in range(n):
        yield np.array(model(mx.array([[token]]), cache=caches))


@pytest.mark.parametrize("roomy", [H2O(max_kv=64), H2O(max_kv=64, kind="raw"), BlockEviction(max_kv=64)])
def test_logits_below_the_budget_have_the_same_bits(model, kv, roomy):
    due = list(passes(model, kv.make_cache()))
    assert all(map(np.array_equal, passes(model, make_cache(model, roomy)), due))
    assert not all(map(np.array_equal, passes(model, make_cache(model, POLICIES["h2o"])), due))


def test_eviction_keeps_the_logits_of_others_on_a_shared_prefix(model, kv, policy):
    first = kv.make_cache()
    due = list(passes(model, first, [*PROMPT, 1]))[-30:]
    kv.commit(first, [*PROMPT, 1, *range(30)])
    kept, cached = kv.fetch(PROMPT)
    kv.eviction = policy
    evicting, _ = kv.fetch(PROMPT)
    pairs = zip(passes(model, kept, [*PROMPT, 1][cached:]), passes(model, evicting, [9, 8]), strict=True)
    got = [mine for mine, _ in pairs][-30:]
    assert kv.pool.kv_len(evicting[0].batch.handles[0]) <= policy.max_kv < cached
    assert all(map(np.array_equal, got, due))


def test_keys_of_the_first_layer_are_those_of_their_positions(model, kv, policy):
    # They depend on token and position alone, so what stays must be, turned for turned, what nobody evicted has.
    caches, whole = kv.make_cache(policy), kv.make_cache()
    said = tokens(model, caches, n=50)
    model(mx.array([PROMPT + said]), cache=whole)
    backend, batch = kv.backend, caches[0].batch
    length = int(batch.rows.held[0])
    places = batch.eviction.memory.positions(0, length, caches[0].offset)[0]
    for got, all_of in zip(
        backend.gather(0, kv.pool.table(batch.handles[0]), length),
        backend.gather(0, kv.pool.table(whole[0].batch.handles[0]), whole[0].offset),
        strict=True,
    ):
        due = np.take_along_axis(np.array(all_of), places.T[:, :, None].astype(np.int64), 0)
        np.testing.assert_allclose(np.array(got), due, rtol=1e-5, atol=1e-5)
    assert len({tuple(row) for row in places.tolist()}) >= (2 if "h2o" in str(policy).lower() else 1)


def test_fork_of_an_evicted_sequence_goes_its_own_way(model, kv, policy):
    caches = kv.make_cache(policy)
    tokens(model, caches)
    other = copy.deepcopy(caches)
    due = tokens(model, copy.deepcopy(caches), [5], 30)
    tokens(model, caches, [7], 30)
    assert tokens(model, other, [5], 30) == due


def test_evicted_sequence_is_not_committed(model, kv):
    caches = kv.make_cache(POLICIES["h2o"])
    said = tokens(model, caches)
    assert kv.commit(caches, PROMPT + said) == 0 and kv.fetch(PROMPT)[1] == 0


def test_caches_of_different_policies_stay_apart(model, kv):
    one, two = kv.make_cache(POLICIES["h2o"]), kv.make_cache(POLICIES["blocks"])
    with pytest.raises(ValueError, match=r"\[extend\]"):
        type(one[0]).merge([one[0], two[0]])


def test_pool_without_blocks_for_copies_is_out_of_blocks_and_as_before(model):
    with install(model, 10, block_size=4, eviction=POLICIES["h2o"]) as kv:
        caches = kv.make_cache()
        model(mx.array([PROMPT[:20]]), cache=caches)  # the next pass has to evict
        forks = [copy.deepcopy(caches) for _ in range(2)]
        merged = [type(caches[0]).merge([fork[layer] for fork in (caches, *forks)]) for layer in range(3)]
        with pytest.raises(OutOfBlocks, match=r"\[unshare\]"):  # four blocks are free, each row needs five
            model(mx.array([[5]] * 3), cache=merged)
        assert [kv.pool.kv_len(h) for h in merged[0].batch.handles] == [20, 20, 20]
        kv.pool.check()


def test_policies_that_the_route_cannot_serve_are_refused(model):
    before = dict(vars(model))
    for make in (install, Engine):
        with pytest.raises(ValueError, match=r"\[install\] H2O needs scores, and this model's route is gather"):
            make(model, 50, block_size=4, fused=False, eviction=POLICIES["h2o"])
        with pytest.raises(TypeError, match=r"\[install\] eviction must be a kvpool.eviction.Policy, not int"):
            make(model, 50, block_size=4, eviction=20)
        refused = dict.fromkeys(("qwen3_5", "llama4"), "scores, rows of this model run apart; SlidingWindow needs none")
        refused |= {"mamba2": "no layer that keeps every token", "openelm": "2 shapes"}
        for name, words in refused.items():
            with pytest.raises(ValueError, match=words):
                make(family(name), 40, block_size=4, eviction=POLICIES["h2o"])
        # The last block may be full, and sinks have one of their own.
        with pytest.raises(ValueError, match=r"\[BlockEviction\] max_kv is 20, in blocks of 8 the least is 22"):
            make(model, 50, block_size=8, eviction=POLICIES["blocks"])
    assert vars(model) == before
    with install(model, 50, block_size=8) as kv, pytest.raises(ValueError, match="in blocks of 8 the least is 22"):
        kv.make_cache(POLICIES["blocks"])
    with pytest.raises(RuntimeError, match=r"\[make_cache\] the model has no paged cache here"):
        make_cache(model, POLICIES["h2o"])


@pytest.mark.parametrize("kind", ["raw", "mass"])
@pytest.mark.parametrize("queries", [1, 6, 40])
def test_chunk_is_looked_at_through_its_newest_queries(model, kv, kind, queries):
    """As if they had come one by one; those before them look at nothing."""
    caches = kv.make_cache(H2O(max_kv=100, kind=kind, queries=queries))
    for chunk in PROMPT[:20], PROMPT[20:]:
        model(mx.array([chunk]), cache=caches)
    memory = caches[0].batch.eviction.memory
    caches[0].batch.eviction.settle()
    whole, due = kv.make_cache(H2O(max_kv=100, kind=kind)), None
    for at in range(33):
        model(mx.array([PROMPT[at : at + 1]]), cache=whole)
        eviction = whole[0].batch.eviction
        new = np.abs(np.stack([np.array(scores)[0] for scores in eviction._staged]))
        eviction.forget()
        if 20 - queries <= at < 20 or at >= 33 - queries:
            old = 0 if due is None else due.shape[2]
            blended = [] if due is None else [0.95 * due + 0.05 * new[..., :old]]
            due = np.concatenate([*blended, new[..., old:]], axis=2)
    assert memory.known.tolist() == [33]
    np.testing.assert_allclose(memory.scores[:, 0, :, :33], due, rtol=2e-3, atol=1e-5)


def test_chunks_of_a_padded_batch_are_looked_at_row_by_row(model, kv):
    policy = H2O(max_kv=100, queries=9)
    layers = zip(kv.make_cache(policy), kv.make_cache(policy), strict=True)
    merged = [type(layer[0]).merge(layer) for layer in layers]
    rows = [PROMPT[:14], PROMPT[3:8]]
    for cache in merged:
        cache.prepare(lengths=[14, 5], right_padding=[0, 9])
    model(mx.array([rows[0], rows[1] + [0] * 9]), cache=merged)
    eviction = merged[0].batch.eviction
    eviction.settle()
    for row, prompt in enumerate(rows):
        caches = kv.make_cache(policy)
        model(mx.array([prompt]), cache=caches)
        caches[0].batch.eviction.settle()
        due = caches[0].batch.eviction.memory.scores[:, 0, :, : len(prompt)]
        np.testing.assert_allclose(eviction.memory.scores[:, row, :, : len(prompt)], due, rtol=2e-3, atol=1e-5)
    assert eviction.memory.known.tolist() == [14, 5]
