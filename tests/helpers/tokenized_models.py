"""The tiny model with tokenizers of three kinds: what holds for text must hold on all of them.

``bytes`` has a token for each byte and nothing else. ``merges`` is a BPE of bytes with merges, as Qwen has it: its
marks ``<...>`` are added tokens, some of which are not special. ``signs`` is a BPE of characters that falls back to
bytes, as Mistral has it: its marks ``[...]`` and a few words are added tokens, and one of the words ends an answer.
"""

import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import tiny

KINDS = ("bytes", "merges", "signs")
WORDS = [
    *("weather", "clock", "city", "days", '"name": "', '", "', "arguments", "},", '":', '{"', "\u00e9"),
    *("</", "<to", "<end", "nk", "k>", ">x", "k>x", "xy"),
]
"""What the tokenizers with merges have tokens for. Some are a part of a mark, others go across the end of one."""
TEMPLATES = {
    "merges": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}<tool_call>\n"
        '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking and 'Think' in (messages[-1].content or '') %}<think>\n{% endif %}{% endif %}"
    ),
    "signs": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[INST] {{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}[/INST]{% endfor %}"
    ),
}


def merged(letters, words):
    """A vocabulary and merges that make these words of letters."""
    vocab, merges = {letter: number for number, letter in enumerate(letters)}, []
    for word in words:
        for end in range(1, len(word)):
            if (word[:end], word[end]) not in merges:
                merges.append((word[:end], word[end]))
                vocab.setdefault(word[: end + 1], len(vocab))
    return vocab, merges


def plain_merges():
    """As Qwen has it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(part for part, _ in level.pre_tokenize_str(word)) for word in WORDS]
    vocab, merges = merged(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    plain = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    plain.pre_tokenizer, plain.decoder = level, decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>", tiny.END)])
    plain.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "Rom"])
    return plain, ["<|im_end|>", tiny.END]


def plain_signs():
    """As Mistral has it."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", *map(chr, range(33, 127)), "\u6f22"]
    vocab, merges = merged(letters, [word.replace(" ", "\u2581") for word in WORDS if word.isascii()])
    plain = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=False))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    signs = ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
    plain.add_special_tokens([AddedToken(one, special=True) for one in signs])
    plain.add_tokens(["[ARGS]", "Oslo", "red", "halt"])
    return plain, ["</s>", "halt"]


@cache
def folder(kind):
    """A folder with the model, for whatever takes a path to one. It stays until the process ends."""
    FOLDERS.append(tempfile.TemporaryDirectory(prefix=f"kvpool-{kind}-"))
    place = Path(FOLDERS[-1].name)
    if kind == "bytes":
        tiny.write(place, tiny.CONFIG, *tiny.make())
        return str(place)
    plain, ends = {"merges": plain_merges, "signs": plain_signs}[kind]()
    ids = [plain.token_to_id(one) for one in ends]
    fields = tiny.CONFIG | {"vocab_size": plain.get_vocab_size() + 3, "eos_token_id": ids}  # more rows than tokens
    model = tiny_families.build("llama", fields)
    tiny.randomize(model)
    names = [plain.id_to_token(token) or "\u6f22" for token in range(fields["vocab_size"])]
    said = [token in ids or (name.isascii() and not name.startswith("<0x")) for token, name in enumerate(names)]
    model.lm_head.weight *= mx.array(said)[:, None]
    options = {"eos_token": ends[0], "chat_template": TEMPLATES[kind], "clean_up_tokenization_spaces": False}
    tiny.write(place, fields, model, PreTrainedTokenizerFast(tokenizer_object=plain, **options))
    return str(place)


FOLDERS = []


@cache
def make(kind):
    """The model and its tokenizer, as ``mlx_lm.load`` gives them."""
    return tiny.make() if kind == "bytes" else mlx_lm.load(folder(kind))[:2]
