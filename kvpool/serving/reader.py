"""Tokenizes a text, in a process that does nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
from array import array
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it

_made: dict[str, Tokenizer] = {}


def _load(tokenizer: bytes, splits: bool) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread of its own would have an arena of malloc of its own
    for sent in (signal.SIGINT, signal.SIGHUP):  # by the terminal, also to the server, which ends this process
        signal.signal(sent, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a pipe that nobody reads: what Rust says of a panic would fill it
    made = Tokenizer.from_buffer(tokenizer)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = splits
    return made


def read(name: str, text: str, special: bool, *how: Any) -> array[int] | None:
    """Return the tokens of a text, with or without those that begin and end a prompt. Raise ValueError if that fails.

    None: the tokenizer of this name has to be made, by `how`: its JSON, and whether names of special tokens are text.
    """
    try:
        if how:
            _made[name] = _load(*how)
        if name not in _made:
            return None
        return array("i", _made[name].encode_batch_fast([text], add_special_tokens=special)[0].ids)
    except BaseException as error:  # a panic in Rust cannot be pickled
        raise ValueError(str(error)[:1000]) from None
    finally:
        trim(0)
