"""Models with sliding layers on one pool: tokens equal `generate`, windows let blocks go, nothing leaks."""

import numpy as np
import pytest
import torch
from test_transformers import VOCAB, alone, generate, generation, wandering
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, MistralConfig

from kvpool.adapters.transformers import PoolAllocator, install

WINDOW, NEW = 12, 12
LENGTHS = (3, 12, 40, 9, 30, 5, 21, 13)
S, F = "sliding_attention", "full_attention"
MODELS = {  # 5 windows and 2 full layers share no divisor; gpt-oss has as many of each; Mistral has windows alone
    "gemma3": (Gemma3TextConfig, [S, S, F, S, S, F, S]),
    "gpt_oss": (GptOssConfig, [S, F, S, F]),
    "mistral": (MistralConfig, None),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    kind, layers = MODELS[request.param]
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind is GptOssConfig else {}
    layout = {"num_hidden_layers": 2} if layers is None else {"num_hidden_layers": len(layers), "layer_types": layers}
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **layout, **more)).float().eval()
    return wandering(model)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return alone(model, prompts)


@pytest.fixture
def pools(monkeypatch):
    """The pools that are made during a test."""
    made = []
    original = PoolAllocator.lead

    def lead(self, members):
        original(self, members)
        made.append(self)

    monkeypatch.setattr(PoolAllocator, "lead", lead)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4},
        {"page_size": 5, "max_batch_tokens": 16},  # prompts in chunks, some longer than the window
        {"page_size": 16, "num_blocks": 6},  # a few requests at a time
    ],
    ids=str,
)
def test_continuous_batching_equals_generate_and_leaks_nothing(model, prompts, expected, pools, options):
    with install():
        assert generate(model, prompts, **options) == expected
    (leader,) = pools
    assert leader.blocks.stats().used == 0 and not leader.handles
    assert leader.blocks.stats().peak_used > 0
    leader.blocks.check()


def test_one_prompt_alone_equals_generate(model, prompts, expected):
    with install():
        assert [generate(model, [prompt], page_size=4)[0] for prompt in prompts[:3]] == expected[:3]


def test_samples_of_one_prompt_are_forks_that_copy_on_write(model, prompts, expected, pools):
    with install():
        settings = generation(num_return_sequences=3, do_sample=True, top_k=1)
        tokens = generate(model, prompts[:3], settings, page_size=4, num_blocks=128)
    assert tokens == [row for row in expected[:3] for _ in range(3)]
    (leader,) = pools
    stats = leader.blocks.stats()
    assert stats.used == 0 and stats.cow_copies > 0
    leader.blocks.check()


def test_windows_hold_their_last_tokens_alone(model, prompts, pools):
    """The most blocks of a long answer are those of the full layers, and of the window with a page at either end."""
    with install():
        generate(model, [prompts[0]], generation(max_new_tokens=60), page_size=4)
    (leader,) = pools
    entries = {"full": -(-(len(prompts[0]) + 60) // 4), "window": -(-WINDOW // 4) + 1}
    most = sum(entries[member.group.kind] * member.columns for member in leader.members)
    assert leader.blocks.stats().peak_used <= most
    assert {member.group.kind for member in leader.members} >= {"window"}
