"""Generate text with a model of mlx-lm on a paged KV cache, any number of prompts at a time."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError, real, whole
from kvpool.cli.options import (
    add_cache_arguments,
    add_draft_arguments,
    add_model_arguments,
    blocks_in_memory,
    by_flags,
    engine_options,
    load_draft_model,
    memory_of,
    num_drafts_of,
    proposer,
)
from kvpool.cli.wired import add_wired_argument, fit_wired, wired
from kvpool.errors import KVPoolError, install_command

if TYPE_CHECKING:
    from kvpool.adapters.mlx_lm.engine import Completion, Engine, TokenEvent

OPTIONS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--max-tokens", "N", "256", "tokens to generate per sample, at most (default: %(default)s)"),
    ("--temperature", "T", "0", "0 takes the likeliest token (default: %(default)s)"),
    ("--top-p", "P", "1", "sample from the likeliest tokens that together have this probability"),
    ("--top-k", "K", "0", "sample from the K likeliest tokens; 0: from all"),
    ("--min-p", "P", "0", "drop tokens less probable than P times the likeliest one"),
    ("--seed", "S", None, "the same seed gives the same text; sample i has S + i (default: a new one)"),
    ("--n", "N", "1", "samples per prompt; they share the prompt's blocks (default: %(default)s)"),
    ("--beam", "W", "0", "beam search with W hypotheses, of which the --n best are printed"),
    ("--chunk", "TOKENS", "256", "tokens of a prompt in one step, at most (default: %(default)s)"),
    ("--kv-block-size", "TOKENS", "16", "tokens per block of the cache (default: %(default)s)"),
    ("--num-blocks", "N", None, "blocks of the cache (default: what all prompts need at once)"),
    ("--max-running", "N", "64", "samples that run at a time, at most (default: %(default)s)"),
    ("--system", "TEXT", None, "system prompt in front of each prompt; implies --chat"),
)
REPEATED = (
    ("--prompt", "TEXT", "may be given several times; - reads standard input (default: -)"),
    ("--prompt-file", "FILE", "a prompt in a file; repeatable"),
    ("--stop", "TEXT", "end before this text; repeatable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Numbers are read by `run`, which says in one line what is wrong with one."""
    add_model_arguments(parser, "PATH_OR_ID", "a folder, a repository of the Hugging Face Hub")
    for name, metavar, text in REPEATED:
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    for name, metavar, default, text in OPTIONS:
        parser.add_argument(name, metavar=metavar, default=default, help=text)
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share what prompts have in common (default: yes)",
    )
    parser.add_argument("--stats", action="store_true", help="print speed and use of the cache to stderr")
    add_draft_arguments(parser)
    add_cache_arguments(parser)
    add_wired_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Generate, and print text as it comes."""
    with wired(args.wired):
        return run_wired(args)


def run_wired(args: argparse.Namespace) -> int:
    """Do that with the memory wired that --wired says."""
    options = request_options(args)
    prompts = read_prompts(args.prompt or ([] if args.prompt_file else ["-"]), args.prompt_file)
    engine, encoded = make_engine(args, prompts, options)
    printer = Printer(len(prompts), options["n"], quiet=args.json)
    begin = time.perf_counter()
    if options["n"] > 1 and not options["temperature"] and not options["beam_width"]:
        print("kvpool generate: without --temperature all samples of a prompt are the same text", file=sys.stderr)
    with engine, interrupts() as came:
        submit(engine, printer, encoded, options)
        done: dict[Any, Completion] = {}
        while engine.num_unfinished and not came:
            for completion in engine.step():
                if isinstance(completion.error, KVPoolError):
                    number: Any = completion.id
                    raise CommandError(f"prompt {number + 1}: {str(completion.error).rpartition('] ')[2]}") from None
                if completion.error is not None:
                    raise completion.error
                done[completion.id] = completion
                printer.end(completion)
        for number in range(len(prompts)):
            if number in engine:
                done[number] = engine.cancel(number)
                printer.end(done[number])
        facts = statistics(engine, list(done.values()), time.perf_counter() - begin)
    if args.json:
        answers = [describe(prompt, done[number]) for number, prompt in enumerate(prompts)]
        print(json.dumps({"model": args.model, "answers": answers, "stats": facts}, indent=2))
    elif args.stats:
        print(f"\n{show(facts, drafts=num_drafts_of(args) > 0)}", file=sys.stderr)
    if came:
        raise KeyboardInterrupt
    return 0


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of ending the process, so that a step of the engine is whole. The second one ends it."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Engine.submit`, checked as far as possible without a model."""
    options: dict[str, Any] = {
        "max_tokens": whole("--max-tokens", args.max_tokens),
        "n": whole("--n", args.n),
        "beam_width": whole("--beam", args.beam, 0),
        "temperature": real("--temperature", args.temperature, 0),
        "top_p": real("--top-p", args.top_p, 0),
        "min_p": real("--min-p", args.min_p, 0, 1),
        "top_k": whole("--top-k", args.top_k, 0),
        "stop": args.stop,
    }
    if not 0 < options["top_p"] <= 1:
        raise CommandError(f"--top-p {args.top_p}: out of range, above 0 and at most 1")
    if args.seed is not None:
        options["seed"] = whole("--seed", args.seed, 0)
    if options["beam_width"]:
        if options["n"] > options["beam_width"]:
            raise CommandError(f"--n {args.n}: a beam of {args.beam} has only {args.beam} hypotheses")
        if args.stop:
            raise CommandError("--stop and --beam exclude each other")
        for name, neutral in (("temperature", 0), ("top_p", 1), ("top_k", 0), ("min_p", 0)):
            if options[name] != neutral:
                raise CommandError(f"--{name.replace('_', '-')} and --beam exclude each other: a beam does not sample")
    if "" in args.stop:
        raise CommandError("--stop: the text is empty")
    memory_of(args)
    return options


def read_prompts(texts: list[str], files: list[str]) -> list[str]:
    """The prompts, with standard input in the place of -, and those of files."""
    if texts.count("-") > 1:
        raise CommandError("--prompt -: standard input can be read only once")
    found = [("--prompt -", sys.stdin.read().rstrip("\n")) if text == "-" else ("--prompt", text) for text in texts]
    for name in files:
        try:
            text = Path(name).read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as exc:
            raise CommandError(f"--prompt-file {name}: {exc.strerror}") from None
        found.append((f"--prompt-file {name}", text.rstrip("\n")))
    for source, prompt in found:
        if not prompt:
            raise CommandError(f"{source}: it is empty")
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python reads bytes that are not text
            raise CommandError(f"{source}: it is not valid UTF-8")
    return [prompt for _, prompt in found]


def make_engine(
    args: argparse.Namespace, prompts: list[str], options: dict[str, Any]
) -> tuple[Engine, list[list[int]]]:
    """Return an engine with a pool that fits, and the tokens of the prompts."""
    given, num_drafts = engine_options(args, 2), num_drafts_of(args)
    block_size, max_running, num_blocks = given["block_size"], given["max_running"], given["num_blocks"]
    if args.eviction not in (None, "window") and options["beam_width"]:
        raise CommandError(f"--eviction {args.eviction} and --beam exclude each other: a beam keeps every token")
    try:
        from kvpool.adapters.mlx_lm import loading
        from kvpool.adapters.mlx_lm.engine import Engine
    except ImportError as exc:
        raise CommandError(f"needs mlx-lm ({exc}): {install_command('mlx')}") from None
    if sys.stderr.isatty():
        print(f"kvpool generate: loading {args.model} ...", file=sys.stderr)
    try:
        model, tokenizer = loading.load(args.model)
    except loading.ModelNotLoaded as exc:
        raise CommandError(f"--model {exc}") from None
    draft = load_draft_model(args, tokenizer)
    encoded = [encode(tokenizer, prompt, args) for prompt in prompts]
    lengths = [len(tokens) + options["max_tokens"] for tokens in encoded]
    refuse_endless(model, lengths, options["max_tokens"], 2**31 - 1)
    try:
        if num_blocks is None:
            sequences = max(options["n"], options["beam_width"]) + 1  # one more: copies, and shared beginnings
            rows = min(max_running, sequences * len(prompts))
            most = blocks_in_memory(args, model, block_size, rows, draft)
            if given["eviction"] is None and loading.keeps_every_token(model):
                refuse_endless(model, lengths, options["max_tokens"], (most - 1) * block_size)
            needed = 1 + sum(sequences * (-(-length // block_size) + 1) for length in lengths)
            num_blocks = most if args.memory else min(most, max(needed, 64))
        engine = Engine(
            model,
            tokenizer=tokenizer,
            prefix_cache=args.prefix_cache,
            speculate=proposer(num_drafts, draft, num_blocks * block_size, max_running),
            **given | {"num_blocks": num_blocks},
        )
    except (ValueError, TypeError, RuntimeError, MemoryError) as exc:
        raise CommandError(f"--model {args.model}: {by_flags(exc) or 'not enough memory'}") from None
    fit_wired(args.wired)
    return engine, encoded


def refuse_endless(model: Any, lengths: list[int], max_tokens: int, most: int) -> None:
    """Refuse prompts that are too long with their answers for the model or for memory, before a pool is made."""
    from kvpool.adapters.mlx_lm.shapes import max_positions

    longest = max_positions(model) or 2**31
    for number, length in enumerate(lengths):
        if length - 1 > min(longest, most):  # the last token is never an input
            takes = f"the model takes {longest}" if longest < most else f"memory holds {most} tokens"
            tokens = f"{length - max_tokens} prompt tokens and {max_tokens} more"
            raise CommandError(f"prompt {number + 1}: {tokens}, {takes}")


def encode(tokenizer: Any, prompt: str, args: argparse.Namespace) -> list[int]:
    """The tokens of a prompt."""
    if not args.chat and args.system is None:
        return list(tokenizer.encode(prompt))
    if not tokenizer.has_chat_template:
        raise CommandError(f"{'--chat' if args.chat else '--system'}: this model has no chat template")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    turns = [*system, {"role": "user", "content": prompt}]
    try:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True))
    except Exception as exc:  # of the template: some refuse a system prompt
        raise CommandError(f"the chat template of this model refuses the prompt: {exc}") from None


def submit(engine: Engine, printer: Printer, prompts: list[list[int]], options: dict[str, Any]) -> None:
    """Put all prompts in the queue, numbered from 0."""
    for number, prompt in enumerate(prompts):
        listener = None if options["beam_width"] else printer.on_token
        try:
            engine.submit(prompt, id=number, on_token=listener, **options)
        except (ValueError, TypeError) as exc:
            raise CommandError(f"prompt {number + 1}: {str(exc).rpartition('] ')[2]}") from None


class Printer:
    """Prints the text of samples that arrive in parallel, one after the other, each as soon as possible.

    `prompts` is how many there are, and `samples` those of each. If it is `quiet`, nothing is printed.
    """

    def __init__(self, prompts: int, samples: int, quiet: bool) -> None:
        self._quiet, self._prompts, self._samples = quiet, prompts, samples
        self._waiting = [(number, index) for number in range(prompts) for index in range(samples)][::-1]
        self._text: dict[tuple[Any, int], str] = {}
        self._ended: set[tuple[Any, int]] = set()
        self._printed = 0  # characters of the sample that comes next

    def on_token(self, event: TokenEvent) -> None:
        """Take new text of a sample."""
        self._add((event.id, event.index), event.text, event.finish_reason is not None)

    def end(self, completion: Completion) -> None:
        """A request has ended. Its text has been printed already, unless it is a beam or was cancelled."""
        for index, sample in enumerate(completion.samples):
            key: tuple[Any, int] = (completion.id, index)
            if key not in self._ended and (sample.text or sample.finish_reason != "cancelled"):
                self._add(key, sample.text[len(self._text.get(key, "")) :], True)
            elif key not in self._ended:
                self._waiting.remove(key)
                self._flush()

    def _add(self, key: tuple[Any, int], text: str, is_last: bool) -> None:
        self._text[key] = self._text.get(key, "") + text
        if is_last:
            self._ended.add(key)
        self._flush()

    def _flush(self) -> None:
        """Print what may be printed now. A sample has no head before it has text or has ended."""
        while not self._quiet and self._waiting and self._waiting[-1] in self._text:
            key, text = self._waiting[-1], self._text[self._waiting[-1]]
            if not self._printed and (text or key in self._ended):
                self._head(*key)
            sys.stdout.write(text[self._printed :])
            self._printed = len(text)
            if key not in self._ended:
                break
            sys.stdout.write("\n")
            self._printed = 0
            self._waiting.pop()
        sys.stdout.flush()

    def _head(self, number: int, index: int) -> None:
        parts = [f"prompt {number + 1}"] * (self._prompts > 1) + [f"sample {index + 1}"] * (self._samples > 1)
        if parts:
            sys.stdout.write(f"=== {', '.join(parts)}\n")


def describe(prompt: str, completion: Completion) -> dict[str, Any]:
    """A request as JSON has it."""
    return {
        "prompt": prompt,
        "samples": [
            {
                "text": one.text,
                "tokens": one.tokens.tolist(),
                "logprobs": None if one.logprobs is None else [round(float(x), 5) for x in one.logprobs],
                "score": one.output.score,
                "finish_reason": one.finish_reason,
                "num_cached": one.output.num_cached,
                "preemptions": one.output.preemptions,
            }
            for one in completion.samples
        ],
    }


def statistics(engine: Engine, done: list[Completion], seconds: float) -> dict[str, Any]:
    """Speed, and use of the cache, ready for JSON. Seconds are those from the first step to the last token."""
    scheduler, kv = engine.scheduler.stats(), engine.kv
    arenas = [kv.pool.stats(arena) for arena in range(len(kv.layout.block_nbytes))]
    firsts = sorted(
        one.output.times.first_token - one.output.times.arrived
        for completion in done
        for one in completion.samples
        if one.output.times.first_token is not None
    )
    tokens = sum(len(one.tokens) for completion in done for one in completion.samples)
    return {
        "route": engine.kv.route,
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_seconds": round(firsts[len(firsts) // 2], 4) if firsts else None,
        "steps": scheduler.steps,
        "prefill_tokens": scheduler.prefill_tokens,
        "hit_tokens": scheduler.hit_tokens,
        "preemptions": scheduler.preemptions,
        "drafted_tokens": scheduler.drafted_tokens,
        "accepted_tokens": scheduler.accepted_tokens,
        "blocks": sum(arena.num_blocks for arena in arenas),
        "blocks_peak": sum(arena.peak_used for arena in arenas),
        "blocks_left": sum(arena.used for arena in arenas),
        "cow_copies": sum(arena.cow_copies for arena in arenas),
    }


def show(facts: dict[str, Any], *, drafts: bool) -> str:
    """The statistics as aligned lines, with one about drafts if there were to be some."""
    rows = [
        ("speed", f"{facts['tokens']} tokens in {facts['seconds']:.2f} s, {facts['tokens_per_second']} a second"),
        ("first token", f"after {facts['first_token_seconds']} s (median)"),
        ("prompts", f"{facts['prefill_tokens']} tokens computed, {facts['hit_tokens']} found in the prefix cache"),
        ("steps", f"{facts['steps']}, with {facts['preemptions']} preemptions"),
        *[("drafts", f"{facts['drafted_tokens']} tokens drafted, {facts['accepted_tokens']} accepted")] * drafts,
        ("blocks", f"{facts['blocks_peak']} of {facts['blocks']} used at most, {facts['cow_copies']} copied on write"),
        ("attention", facts["route"]),
    ]
    return "\n".join(f"{name:<11}  {text}" for name, text in rows)
