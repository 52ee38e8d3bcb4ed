"""A small random model with a tokenizer of bytes: everything that drives a model can be tried with it, offline.

It is a llama. Its weights are always the same random numbers, large enough that its output wanders. It prefers
printable characters and now and then the end of the text; what it says means nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from mlx_lm.utils import save_config, save_model

NAME = "tiny"
END = "<end>"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # one group of quantized storage
    "rms_norm_eps": 1e-5,
    "vocab_size": 257,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
TEMPLATE = (
    "{% if tools %}[tools] {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% set tool_call = call.function %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make() -> tuple[Any, TokenizerWrapper]:
    """The model and its tokenizer, as ``mlx_lm.load`` gives them."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    randomize(model)
    tokens = byte_tokenizer()
    letters = [tokens.decode([token]) for token in range(len(tokens) - 1)]
    model.lm_head.weight *= mx.array([*(c.isascii() and c.isprintable() for c in letters), True])[:, None]
    model.eval()
    mx.eval(model.parameters())
    return model, tokenizer()


def randomize(model: Any) -> None:
    """Weights large enough that greedy output wanders, the same ones every time."""
    key = mx.random.key(7)
    weights = []
    parameters: Any = tree_flatten(model.parameters())
    for name, weight in parameters:
        if weight.ndim > 1:
            key, own = mx.random.split(key)
            weight = mx.random.normal(weight.shape, key=own) * 0.25
        weights.append((name, weight))
    model.update(tree_unflatten(weights))


def tokenizer() -> TokenizerWrapper:
    """The tokenizer of bytes, with mlx-lm's parser of tool calls."""
    calls: dict[str, Any] = {"tool_call_start": json_tools.tool_call_start, "tool_call_end": json_tools.tool_call_end}
    return TokenizerWrapper(byte_tokenizer(), tool_parser=json_tools.parse_tool_call, **calls)


def byte_tokenizer() -> Any:
    """A tokenizer of transformers with one token per byte of UTF-8, and one for the end of the text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def write(folder: Path, config: dict[str, Any], model: Any, tokenizer: TokenizerWrapper) -> None:
    """Write a model and its tokenizer into a folder, for whatever takes a path to a model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    tokenizer.save_pretrained(folder)
