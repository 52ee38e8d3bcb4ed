"""Grammars: which tokens may come next in an answer that must have a form. llguidance reads and follows them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
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
tokens, matcher = llguidance.LLTokenizer("byte"), llguidance.LLMatcher
print(flush=True)
for line in sys.stdin:
    seconds, source, limits = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    matcher(tokens, source, log_level=0, limits=llguidance.LLParserLimits(**limits)).compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(flush=True)
"""
SPACES = {"whitespace_pattern": r"[ \n]{1,16}"}  # a model that may write spaces without end does so


class GrammarFailed(Exception):
    """A grammar became too complex for its limits, or a token came that it does not allow."""


class Grammar:
    """A grammar that was compiled for one model. Make it with `Grammars`.

    Attributes
    ----------
    eos : frozenset of int
        The tokens that may come where the grammar ends. A request needs them among its ``eos``.
    after : tuple of int
        The grammar holds from where these tokens have come. Empty: from the first token.
    """

    def __init__(self, matcher: Any, eos: frozenset[int], after: tuple[int, ...] = ()) -> None:
        self._matcher, self.eos, self.after = matcher, eos, after

    def follow(self) -> Follower:
        """Return what follows one sample."""
        return Follower(self._matcher.deep_copy(), self.after)


class Follower:
    """Where one sample is in its grammar. This depends on the tokens of the sample only."""

    def __init__(self, matcher: Any, after: tuple[int, ...]) -> None:
        self._matcher, self._after = matcher, list(after)
        self._taken = 0
        self._holds = not after

    def allowed(self, generated: np.ndarray) -> np.ndarray | None:
        """Return which tokens may come next, one bit each, the lowest first. None: all.

        `generated` has the tokens of the last call and those that came since.

        Raises
        ------
        GrammarFailed
            The sample cannot go on.
        """
        if not self._holds:
            count = len(self._after)
            while not self._holds and self._taken < len(generated):
                self._taken += 1
                self._holds = generated[max(0, self._taken - count) : self._taken].tolist() == self._after
            if not self._holds:
                return None
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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None  # a Popen

    def check(self, source: str) -> None:
        """Raise `ValueError` if a grammar takes too long to read. What else is wrong with it has no effect.

        Raises
        ------
        OSError
            The process does not start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process, answer = self._process, ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([self.SECONDS, source, LIMITS]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            if not answer:
                self.close()
                raise ValueError(f"[grammar] it is too complex: to read it takes more than {self.SECONDS:g} s")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", TRIAL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a signal of the terminal is not for it
        )
        if not self._process.stdout.readline():
            self.close()
            raise ChildProcessError("[grammar] the process that reads grammars does not start")

    def close(self) -> None:
        """End the process. A grammar that it reads is refused."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


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

    def schema(self, schema: Mapping[str, Any] | bool, after: Sequence[int] = ()) -> Grammar:
        """Compile a JSON schema.

        Parameters
        ----------
        schema : mapping
        after : ints
            The grammar holds from where these tokens have come: the end of a think block.

        Raises
        ------
        ValueError
            The grammar is wrong, too long or too complex, or the tokenizer is of a kind that llguidance does not read.
        ImportError
            llguidance is not installed.
        OSError
            The process of `trial` does not start.
        """
        return self._compiled("json_schema", json.dumps(schema), after)

    def regex(self, pattern: str, after: Sequence[int] = ()) -> Grammar:
        """Compile a regular expression without look-around. See `schema`."""
        return self._compiled("regex", pattern, after)

    def lark(self, grammar: str, after: Sequence[int] = ()) -> Grammar:
        """Compile a context-free grammar in llguidance's form of Lark. See `schema`."""
        return self._compiled("lark", grammar, after)

    def _compiled(self, kind: str, text: str, after: Iterable[int]) -> Grammar:
        return Grammar(self._matcher(kind, text), frozenset(self._tokenizer.eos_token_ids), tuple(after))

    def _read(self, kind: str, text: str) -> Any:
        llguidance, tokens = self._vocabulary
        if len(text) > LONGEST:
            raise ValueError(f"[grammar] {len(text)} characters, the limit is {LONGEST}")
        matcher = llguidance.LLMatcher
        options = {"overrides": SPACES} if kind == "json_schema" else {}
        source = getattr(matcher, f"grammar_from_{kind}")(text, **options)
        if self.trial is not None:
            self.trial.check(source)
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        made = matcher(tokens, source, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # what the first token needs is made here, and not in a step
        if made.is_error():
            raise ValueError(f"[grammar] {' '.join(made.get_error().split())[:300]}")
        return made

    @cached_property
    def _vocabulary(self) -> tuple[Any, Any]:
        """llguidance, and the tokens of the model in its form."""
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ImportError(f"[grammar] llguidance is not installed: {install_command('serve')}") from error
        try:
            plain, eos = self._tokenizer._tokenizer, sorted(self._tokenizer.eos_token_ids)
            return llguidance, from_tokenizer(plain, n_vocab=self._vocab_size, eos_token=eos)
        except Exception as error:
            raise ValueError(f"[grammar] llguidance cannot read this tokenizer: {str(error)[:200]}") from error
