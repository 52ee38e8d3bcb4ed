"""mlx-vlm's coordinator on `PromptCache`: what its generation finds, stores and answers, beside its own."""

import inspect
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

pytest.importorskip("mlx_vlm")
from mlx_vlm import apc, apc_coordinator
from mlx_vlm.generate import BatchGenerator
from mlx_vlm.models.base import LanguageModelOutput, create_attention_mask
from mlx_vlm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvpool.adapters.mlx_vlm import Coordinator, Manager, install
from kvpool.adapters.prompt_cache import PromptCache

VOCAB, DIM, HEADS = 97, 32, 2
IMAGE = 90  # the token of images
STOCK = apc_coordinator.APCCoordinator


class Tiny(nn.Module):
    """An attention layer, and behind it a window, a state or another attention layer."""

    def __init__(self, kind):
        super().__init__()
        mx.random.seed(3)
        self.kind, self.embed = kind, nn.Embedding(VOCAB, DIM)
        self.projections = [nn.Linear(DIM, 3 * DIM) for _ in range(2)]
        self.head = nn.Linear(DIM, VOCAB)
        for weights in (self.embed, *self.projections, self.head):
            weights.weight = 3 * mx.random.normal(weights.weight.shape) / DIM**0.5
        self.config = SimpleNamespace(image_token_id=IMAGE)
        self.layers = [None, None]

    def make_cache(self):
        second = {"dense": KVCache, "window": lambda: RotatingKVCache(64), "state": lambda: ArraysCache(1)}
        return [KVCache(), second[self.kind]()]

    def __call__(self, tokens, inputs_embeds=None, cache=None, **_):
        x = self.embed(tokens) if inputs_embeds is None else inputs_embeds
        for project, each in zip(self.projections, cache or self.make_cache(), strict=True):
            q, k, v = mx.split(project(x), 3, axis=-1)
            if isinstance(each, ArraysCache):
                before = mx.zeros((x.shape[0], DIM)) if each[0] is None else each[0]
                summed = before[:, None] + mx.cumsum(mx.tanh(k), axis=1)
                each[0] = summed[:, -1]
                x = x + mx.tanh(summed / 8) * q
                continue
            q, k, v = (y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3) for y in (q, k, v))
            mask = create_attention_mask(x, each, window_size=getattr(each, "max_size", None))
            k, v = each.update_and_fetch(k, v)
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
            x = x + y.transpose(0, 2, 1, 3).reshape(x.shape)
        return LanguageModelOutput(logits=self.head(x))


@pytest.fixture(autouse=True)
def stock_again():
    """What `install` has replaced."""
    own = apc.from_env
    yield
    apc.APCCoordinator = apc_coordinator.APCCoordinator = STOCK
    apc.from_env = own


class Never:
    """Stopping criteria that never stop."""

    def add_eos_token_ids(self, tokens):
        pass

    def __call__(self, token):
        return False


def answered(model, prompts, manager, max_tokens=12):
    """The answers, one after the other, and how many tokens were computed for each prompt."""
    tokenizer = SimpleNamespace(stopping_criteria=Never())
    generator = BatchGenerator(
        model, tokenizer, max_tokens=max_tokens, compute_logprobs=False, apc_manager=manager, prefill_batch_size=1
    )
    answers = []
    for prompt in prompts:
        kwargs = {"inputs_embeds": model.embed(mx.array([prompt])), "_apc_semantic_hash": 7}
        generator.insert([prompt], max_tokens=max_tokens, prompt_kwargs=[kwargs])
        answer = []
        while generator.has_work:
            answer += [response.token for response in generator.next()[1]]
        answers.append(answer)
    generator.close()
    return answers


def conversation(turns=5, seed=1):
    rng = random.Random(seed)
    prompts = [[rng.randrange(80) for _ in range(200)]]
    while len(prompts) < turns:
        prompts.append([*prompts[-1], *(rng.randrange(80) for _ in range(rng.randint(1, 60)))])
    return [*prompts, [*prompts[0][:150], 5, 6, 7]]


@pytest.mark.parametrize("kind", ["dense", "window", "state"])
def test_generation_answers_as_without_a_cache_and_finds_what_is_known(kind):
    model, prompts = Tiny(kind), conversation()
    expected = answered(model, prompts, None)
    manager = install(PromptCache(1 << 26))
    assert answered(model, prompts, manager) == expected
    stats = manager.stats_snapshot()
    assert stats["lookups_hit"] >= len(prompts) - 2 and stats["matched_tokens"] > 3 * 200
    assert 0 < stats["resident_bytes"] <= stats["memory_max_bytes"]
    assert len({token for answer in expected for token in answer}) > 10


LOOKUP = {
    "extra_hash": 0,
    "safe_lookup_min": 0,
    "suffix_is_text_only": lambda length: True,
    "prefix_has_media": lambda length: False,
}


def served(coordinator, tokens, extra_hash=0):
    """What a server does for a prompt; returns the length of its hit."""
    hit = coordinator.lookup(tokens, **LOOKUP | {"extra_hash": extra_hash})
    known = hit["prefix_len"] if hit else 0
    caches = hit["warm_cache"] if hit else coordinator.fresh_cache()

    def computed(length):
        for cache in caches:
            if isinstance(cache, KVCache):
                cache.keys = cache.values = mx.ones((1, 2, length, 16))
                cache.offset = length
            else:
                cache[0] = mx.ones((1, 64)) * length

    if coordinator.is_checkpoint:
        for length in coordinator.checkpoint_lengths(tokens, set()):
            if length > known:
                computed(length)
                assert coordinator.store_checkpoint(tokens[:length], caches, extra_hash=extra_hash)
    computed(len(tokens))
    assert coordinator.commit(caches, tokens, extra_hash=extra_hash)
    coordinator.release_hit(hit)
    coordinator.manager.release(())
    return known


@pytest.mark.parametrize("kind", ["dense", "state"])
def test_a_shared_document_is_found_behind_another_question(kind):
    """mlx-vlm#2156: the second question computes no more than the half, the third next to nothing."""
    coordinator = Coordinator(Manager(PromptCache(1 << 28)), Tiny(kind))
    document = [number % 80 for number in range(30_000)]
    found = [served(coordinator, document + [80 + number] * 40) for number in range(3)]
    assert found[0] == 0 and found[1] >= 16_000 and found[2] >= 29_970


def test_bytes_are_bounded_whatever_the_number_of_prompts():
    """mlx-vlm#1576: a bound of entries is no bound of bytes."""
    manager = Manager(PromptCache(1 << 20))
    coordinator = manager.coordinator(Tiny("state"))
    for number in range(60):
        served(coordinator, [number] * (500 + 7 * number))
        assert 0 < manager.stats_snapshot()["resident_bytes"] <= 1 << 20
    assert coordinator.lookup([59] * 2000, **LOOKUP)["prefix_len"] > 900
    manager.clear()
    assert manager.stats_snapshot()["resident_bytes"] == 0 and coordinator.lookup([59] * 2000, **LOOKUP) is None
    manager.close()


def test_prompts_of_other_images_share_nothing_and_a_hit_has_all_images():
    coordinator = Coordinator(Manager(PromptCache(1 << 26)), Tiny("dense"))
    tokens = [1] * 20 + [IMAGE] * 30 + [2] * 50
    served(coordinator, tokens, extra_hash=7)
    rules = {
        "safe_lookup_min": apc.media_safe_prefix_min(tokens, {IMAGE}) - 1,
        "suffix_is_text_only": lambda length: apc.prefix_leaves_text_only_suffix(tokens, length, {IMAGE}),
        "prefix_has_media": lambda length: apc.prefix_contains_media_tokens(tokens, length, {IMAGE}),
    }
    asked = [*tokens, 3]
    assert coordinator.lookup(asked, extra_hash=7, **rules)["prefix_len"] == 100
    assert coordinator.lookup(asked, extra_hash=8, **rules) is None
    assert coordinator.lookup([*tokens[:35], 3], extra_hash=7, **rules) is None
    assert all(length >= 50 for length in coordinator.checkpoint_lengths(asked, {IMAGE}))


def test_a_hit_is_quantized_as_the_request_wants_it():
    coordinator = Coordinator(Manager(PromptCache(1 << 26)), Tiny("dense"))
    tokens = [1] * 64
    caches = coordinator.fresh_cache()
    rows = mx.random.normal((1, 2, 64, 64))
    for cache in caches:
        cache.update_and_fetch(rows, rows)
    coordinator.commit(caches, tokens)
    config = {"bits": 8, "group_size": 64}
    found = coordinator.materialize_single(
        coordinator.lookup([*tokens, 2], **LOOKUP), min_capacity_tokens=80, kv_quant_config=config
    )
    assert all(isinstance(cache, QuantizedKVCache) and cache.offset == 64 for cache in found)
    expected = QuantizedKVCache(64, 8)
    expected.update_and_fetch(rows, rows)
    assert all(
        mx.array_equal(a[..., :64, :], b[..., :64, :]) for a, b in zip(found[0].keys, expected.keys, strict=True)
    )
    coordinator.commit(found, [*tokens, 9])  # quantized caches are kept as floats
    plain = coordinator.lookup([*tokens, 2], **LOOKUP)["warm_cache"]
    assert all(isinstance(cache, KVCache) for cache in plain)


@pytest.mark.parametrize("kind", ["dense", "state", "window"])
def test_warm_and_cold_rows_are_one_batch(kind):
    coordinator = Coordinator(Manager(PromptCache(1 << 26)), Tiny(kind))
    for row in range(2):
        caches = coordinator.fresh_cache()
        coordinator.model(mx.array([[row + 1] * (40 + row)]), cache=caches)
        coordinator.commit(caches, [row + 1] * (40 + row))
    asked = [[1] * 41, [9] * 10, [2] * 50]
    picks = [coordinator.lookup(tokens, **LOOKUP) for tokens in asked]
    lengths = [pick["prefix_len"] if pick else 0 for pick in picks]
    assert lengths == [40, 0, 41]
    batch, longest = coordinator.merge_rows(picks, lengths)
    assert longest == 41 and batch[0].offset.tolist() == lengths
    for row, pick in enumerate(picks):
        if pick is not None:
            keys = pick["warm_cache"][0].keys[..., : lengths[row], :]
            assert mx.array_equal(batch[0].keys[row : row + 1, :, longest - lengths[row] : longest], keys)


def test_the_coordinator_has_every_member_that_the_package_calls():
    own = {name for name in vars(STOCK) if not name.startswith("_")}
    assert own == {
        *("enabled", "strategy", "is_checkpoint", "legacy_mode", "fresh_cache", "lookup", "checkpoint_len"),
        *("checkpoint_lengths", "merge_rows", "materialize_single", "store_checkpoint", "commit", "release_hit"),
        *("prepare_prefill", "observe_cache"),
    }
    manager = install(PromptCache(1 << 20))
    assert isinstance(apc.APCCoordinator(manager, Tiny("dense")), Coordinator)
    assert type(apc.APCCoordinator(apc.APCManager(num_blocks=4), Tiny("dense"))) is STOCK
    assert apc.from_env(model_namespace="any", overrides=None) is manager
    coordinator = manager.coordinator(Tiny("dense"))
    coordinator.prepare_prefill([10], prefill_step_size=2048)
    coordinator.observe_cache(coordinator.fresh_cache(), 10)
    assert coordinator.enabled and coordinator.strategy == "block" and coordinator.legacy_mode == "block"


def test_the_example_installs_its_manager_before_the_server_begins():
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "prompt_cache_vlm_server.py"))
    assert apc.from_env().prompts.max_bytes == 8 << 30


@pytest.mark.parametrize(("ours", "theirs"), [(Manager, apc.APCManager), (Coordinator, STOCK)])
def test_methods_take_what_those_of_mlx_vlm_take(ours, theirs):
    for name in set(vars(ours)) & set(vars(theirs)) - {"__init__"}:
        if not inspect.isfunction(vars(ours)[name]):
            continue
        takes, own = inspect.signature(vars(ours)[name]), inspect.signature(vars(theirs)[name])
        needed = [one for one in own.parameters.values() if one.default is one.empty]
        by_name = {one.name for one in needed if one.kind is one.KEYWORD_ONLY}
        given = [None] * (len(needed) - len(by_name)), dict.fromkeys(by_name)
        takes.bind(*given[0], **given[1])
        takes.bind(*given[0], **given[1] | {one: None for one in own.parameters.keys() - {p.name for p in needed}})
