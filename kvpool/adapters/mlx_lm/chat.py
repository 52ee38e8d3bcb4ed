"""Text and tokens: prompts from conversations, where the next turn may rewrite them, and text from new tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

SPACE = "\u2581"  # how SentencePiece writes it
TAIL = 11  # tokens at the end of a prompt among which mlx-lm's server looks for an opened think block


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each a mapping with its role and its content."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(one, Mapping) for one in prompt)


def encoded(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation that the model is to continue."""
    if not tokenizer.has_chat_template:
        raise ValueError("[submit] a prompt of messages needs a chat template, this tokenizer has none")
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))


def rewritten_from(tokenizer: Any, prompt: Sequence[int]) -> int | None:
    """Return where the next turn may rewrite a prompt: at a think block that its last tokens open. None: nowhere.

    Templates leave that block out of the history. mlx-lm's server cuts prompts there, too.
    """
    if not tokenizer.has_thinking:
        return None
    start: int = tokenizer.rfind_think_start(prompt, start=len(prompt) - TAIL)
    return None if start < 0 else start


def speller(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function that gives the bytes of a token, from the vocabulary. Those of a text, joined, are the text.

    A token may be a part of a character, whose text is U+FFFD alone.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    added = {token: name for name, token in tokenizer.get_added_vocab().items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    how = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)

    def spelled(token: int) -> bytes:
        name = added.get(token) or tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return name or b""  # models have a few rows more than their tokenizers have tokens
        if token in added and (decoder is None or decoder.decode([name]) == name):
            return name.encode()
        if '"ByteLevel"' in how and all(letter in letters for letter in name):
            return bytes([letters[letter] for letter in name])
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        text: str = name.replace(SPACE, " ") if SPACE in how else tokenizer.decode([token])
        return text.encode()

    return spelled


class Transcript:
    """Text from tokens, one after the other. It ends before the first of `stops`, wherever tokens end.

    Text that may turn out to be the beginning of a stop string is held back. Without a detokenizer there is no text.
    """

    def __init__(self, detokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer  # a fresh one of mlx-lm's
        self._stops = tuple(stops)
        self._seen = ""
        self.text = ""  # what was shown so far
        self.count = 0  # tokens that were added, up to the one with the stop string
        self.stop: str | None = None  # that came

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string came."""
        return self.stop is not None

    def add(self, token: int) -> str:
        """The text that may be shown when `token` has come. A token that the tokenizer does not have adds none."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        self.count += 1
        with suppress(IndexError, TypeError):  # models have a few rows more than their tokenizers have tokens
            self._detokenizer.add_token(token)
        self._read()
        return self._show(len(self._seen) - self._held())

    def finish(self) -> str:
        """The rest, when no token follows."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        self._detokenizer.finalize()
        self._read()
        return self._show(len(self._seen))

    def _read(self) -> None:
        before = len(self._seen)
        self._seen += self._detokenizer.last_segment
        found = [(self._seen.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        at, self.stop = min((one for one in found if one[0] >= 0), default=(len(self._seen), None))
        self._seen = self._seen[:at]

    def _held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        if self.is_stopped or not self._stops:
            return 0
        for at in range(len(self.text), len(self._seen)):  # what was shown before begins no stop string
            if any(stop.startswith(self._seen[at:]) for stop in self._stops):
                return len(self._seen) - at
        return 0

    def _show(self, end: int) -> str:
        new = self._seen[len(self.text) : end]
        self.text += new
        return new
