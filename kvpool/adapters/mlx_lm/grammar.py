"""Grammars: the tokens that may come next in structured output. llguidance reads and follows them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from kvpool.errors import install_command

LONGEST = 2**16  # characters of a grammar
LIMITS = {"initial_lexer_fuel": 500_000, "max_grammar_size": 100_000, "max_lexer_states": 50_000} | {
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,
    "max_items_in_row": 1_000,
}
"""Of llguidance. They do not bound how long it reads a grammar, which `Trial` does. The worst grammars that we found
take 5 to 7 ms for a token on average."""
TRIAL = """
import json, signal, sys
import llguidance

class Vocabulary:
    is_tokenizer_wrapper, bos_token_id, special_token_ids = True, None, ()

    def __init__(self, size, added):
        size = max([size, *(token + 1 for token in added.values())])  # a model may have fewer than its tokenizer
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(256)] + [b"\\xffend"]
        self.eos_token_id = len(self.tokens) - 1
        for name, token in added.items():
            self.tokens[token] = b"\\xff" + name.encode()

    def __call__(self, text):
        return list(text)

tokens, matcher = llguidance.LLTokenizer(Vocabulary(*json.loads(sys.stdin.readline()))), llguidance.LLMatcher
print(flush=True)
for line in sys.stdin:
    seconds, source, limits = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    matcher(tokens, source, log_level=0, limits=llguidance.LLParserLimits(**limits)).compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(flush=True)
"""
"""Its tokens are bytes, and those that a grammar may name."""
SPACES = {"whitespace_pattern": r"[ \n]{1,16}"}  # a model that may write spaces without end does so
UNFORCED = '%llguidance {"no_forcing": true}'
"""Without it, llguidance tokenizes text that a grammar forces, and the tokenizer finds added tokens in it: ``<end>`` in
a string. llguidance then offers these tokens, and they end the answer or are refused."""


class GrammarFailed(Exception):
    """A grammar became too complex for its limits, or a token came that it does not allow."""


class Grammar:
    """A grammar that was compiled for one model. Make it with `Grammars`.

    Attributes
    ----------
    eos : frozenset of int
        The tokens that may come where the grammar ends. A request needs them among its ``eos``.
    """

    def __init__(self, matcher: Any, eos: frozenset[int]) -> None:
        self._matcher, self.eos = matcher, eos

    def follow(self) -> Follower:
        """Return what follows one sample."""
        return Follower(self._matcher.deep_copy())


class Follower:
    """The place of one sample in its grammar. It depends on the tokens of the sample only."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._taken = matcher, 0

    def allowed(self, generated: np.ndarray) -> np.ndarray:
        """Return which tokens may come next, one bit each, the lowest first. GrammarFailed: the sample cannot go on.

        `generated` has the tokens of the last call and those that came since.
        """
        self._matcher.consume_tokens(generated[self._taken :].tolist())
        self._taken = len(generated)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error() or not bits.any():
            raise GrammarFailed(self._matcher.get_error()[:200] or "no token may come next")
        return bits


class Trial:
    """Reads grammars in another process, which dies of one that takes it more than `SECONDS` of CPU time.

    The process starts with the first grammar. It ends with `close`, or with this process.
    """

    SECONDS = 1.0

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._process: Any = None  # a Popen

    def check(self, source: str) -> None:
        """Raise ValueError if a grammar takes too long to read, OSError if the process does not start."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if not _asked(self._process, [self.SECONDS, source, LIMITS]):
                self.close()
                raise ValueError(f"[grammar] it is too complex: reading it takes more than {self.SECONDS:g} s")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", TRIAL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a signal of the terminal is not for it
        )
        if not _asked(self._process, [self._vocab_size, self._tokenizer.get_added_vocab()]):
            self.close()
            raise ChildProcessError("[grammar] the process that reads grammars does not start")

    def close(self) -> None:
        """End the process. A grammar that it reads is refused."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _asked(process: Any, question: list[Any]) -> str:
    """Return the answer of the process of a `Trial`, "" if it has ended."""
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return str(process.stdout.readline())
    return ""


class Grammars:
    """Compiles grammars for one model. Any thread may call it.

    Parameters
    ----------
    tokenizer
        mlx-lm's wrapper of a fast tokenizer of transformers.
    vocab_size : int
        Tokens that the model has.

    Attributes
    ----------
    trial : Trial or None
        Reads each grammar first that is not among the 64 last ones. None: grammars may take long to read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._matcher = lru_cache(64)(self._read)
        self.trial: Trial | None = None

    def schema(self, schema: Mapping[str, Any] | bool, after: str = "") -> Grammar:
        """Compile a JSON schema.

        Parameters
        ----------
        schema : mapping
        after : str
            What ends the think block that the prompt has opened. The grammar holds from there.

        Raises
        ------
        ValueError
            The grammar is wrong, too long or too complex, or the tokenizer is of a kind that llguidance does not read.
        ImportError
            llguidance is not installed.
        OSError
            The process of `trial` does not start.
        """
        if isinstance(schema, bool):  # which llguidance does not take
            schema = {} if schema else {"enum": []}
        return self._compiled("json_schema", json.dumps(schema), after)

    def regex(self, pattern: str, after: str = "") -> Grammar:
        """Compile a regular expression without look-around. See `schema`."""
        return self._compiled("regex", pattern, after)

    def lark(self, grammar: str, after: str = "") -> Grammar:
        """Compile a context-free grammar in llguidance's form of Lark. See `schema`."""
        return self._compiled("lark", grammar, after)

    def mark(self, text: str) -> str:
        """Return `text` for a grammar of Lark, with the tokens that the tokenizer finds in it.

        Text in a grammar is never such a token: with ``"<tool_call>"``, a model has to spell what it knows as one.

        Raises
        ------
        ValueError, ImportError
            See `schema`.
        """
        _, vocabulary = self._vocabulary
        tokens = vocabulary.tokenize_str(text)
        if vocabulary.decode_str(tokens) != text:  # a normalizer has changed it
            return json.dumps(text)
        parts: list[str] = []
        for is_mark, run in groupby(tokens, vocabulary.is_special_token):
            some = list(run)
            parts += [f"<[{token}]>" for token in some] if is_mark else [json.dumps(vocabulary.decode_str(some))]
        return " ".join(parts)

    def _compiled(self, kind: str, text: str, after: str) -> Grammar:
        return Grammar(self._matcher(kind, text, after), frozenset(self._tokenizer.eos_token_ids))

    def _read(self, kind: str, text: str, after: str) -> Any:
        llguidance, vocabulary = self._vocabulary
        if len(text) > LONGEST:
            raise ValueError(f"[grammar] {len(text)} characters, the limit is {LONGEST}")
        matcher = llguidance.LLMatcher
        answer = {"lark_grammar": text}
        if kind != "lark":
            options = {"overrides": SPACES} if kind == "json_schema" else {}
            [answer] = json.loads(getattr(matcher, f"grammar_from_{kind}")(text, **options))["grammars"]
        source = json.dumps({"grammars": [{"lark_grammar": self._head(after)}, answer | {"name": "answer"}]})
        if self.trial is not None:
            self.trial.check(source)
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        made = matcher(vocabulary, source, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # what the first token needs is made here, and not in a step
        if made.is_error():
            raise ValueError(f"[grammar] {' '.join(made.get_error().split())[:300]}")
        return made

    def _head(self, after: str) -> str:
        """Return a grammar of what is before the answer: a thought up to the first `after`, or nothing."""
        mark, text, lines = self.mark(after), json.dumps(after), [UNFORCED]
        if not after:
            lines += ["start: @answer"]
        elif mark == text:
            lines += ["start: thought @answer", f"thought[suffix={text}]: /(?s:.*)/"]
        else:  # spelled, it would look like the end of the thought
            lines += [f"start: THOUGHT {mark} @answer", f"THOUGHT: /(?s:.*)/ & ~(/(?s:.*)/ {text} /(?s:.*)/)"]
        return "\n".join(lines)

    @cached_property
    def _vocabulary(self) -> tuple[Any, Any]:
        """llguidance, and the tokens of the model in its form. Tokens that end an answer are not text there."""
        try:
            import llguidance
            from tokenizers import AddedToken
        except ImportError as error:
            raise ImportError(f"[grammar] llguidance is not installed: {install_command('serve')}") from error
        try:
            eos = sorted(self._tokenizer.eos_token_ids)
            plain = copy(self._tokenizer._tokenizer.backend_tokenizer)
            plain.no_padding()
            plain.no_truncation()
            plain.add_special_tokens([AddedToken(plain.id_to_token(token), special=True) for token in eos])
            return llguidance, llguidance.LLTokenizer(plain.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        except Exception as error:
            raise ValueError(f"[grammar] llguidance cannot read this tokenizer: {str(error)[:200]}") from error
