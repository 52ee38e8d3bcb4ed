"""Prompts from conversations, and where the next turn may rewrite them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TAIL = 11  # tokens at the end of a prompt among which mlx-lm's server looks for an opened think block


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each a mapping with its role and its content."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(one, Mapping) for one in prompt)


def encoded(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation that the model is to continue.

    Raises
    ------
    ValueError
        The tokenizer has no chat template.
    """
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
