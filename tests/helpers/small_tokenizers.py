"""Small tokenizers of the kinds that models have: bytes, byte pairs with merges and added tokens, pieces, words."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "the block table maps positions to slots",
    "a  pool of blocks, é ü 漢字 \u1100\u1161 naïve",
    "x = [1, 2]\n\n\tdef f():",
]


def _byte_pairs() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes, a regular expression of words, NFC."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.add_tokens([AddedToken(name, special=False) for name in ("<tool_call>", "[INST]", "call")])
    return made


def _pieces() -> Tokenizer:
    """As Llama 2 and Gemma: a mark in place of spaces, no words, bytes for what is unknown, a token in front."""
    bytes_first = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab = bytes_first | {piece: 256 + number for number, piece in enumerate(("▁", "t", "h", "e", "▁t", "he", "▁the"))}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<end>")])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made


def _words() -> Tokenizer:
    """As BERT: words, and one token for each that is unknown."""
    vocab = {piece: number for number, piece in enumerate(("[UNK]", "the", "block", "##s", "table"))}
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


KINDS = {"byte pairs": _byte_pairs, "pieces": _pieces, "words": _words}


def tokenizer_of(kind: str) -> Any:
    """mlx-lm's wrapper of a tokenizer of this kind."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="<end>"))
