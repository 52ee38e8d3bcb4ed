"""Show on this machine what kvpool does: a step's cost, forks, prefix hits, layer groups, mlx-lm's own tokens.

Each part computes something and checks sentences about it. If a part cannot run, for example because mlx-lm is not
installed, it says why, and the exit status is 1, as after a sentence that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvpool
from kvpool.cli.bench import PlainAllocator, least_seconds
from kvpool.cli.console import CommandError
from kvpool.cli.wired import add_wired_argument, wired
from kvpool.config import format_nbytes
from kvpool.errors import install_command

MIN_RATIO = 10.0  # far below what is measured, so that a noisy machine does not decide
ROWS, CONTEXT, ROUNDS = 256, 4096, 9  # of the step whose cost is measured
PROMPTS, NEW_TOKENS = (7, 212, 40, 95, 18, 131, 64, 33), 48  # tokens of each prompt, and of its answer
SAMPLES, SAMPLE_PROMPT, SAMPLE_TOKENS = 16, 150, 24
TEXTS = (
    "The block table maps",
    "A paged KV cache stores keys and values in blocks that need not be contiguous in memory, because",
    "1, 1, 2, 3, 5, 8,",
    "def fork(parent):\n    # share every block, copy none\n",
)
"""Prompts for a checkpoint that has a tokenizer."""


class NotRun(Exception):
    """A part cannot run here. The message says what is missing and how to install it."""


class Claim(NamedTuple):
    """A sentence, whether it holds, and the numbers that show it."""

    name: str
    holds: bool
    sentence: str
    measured: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="run the parts with a model on this checkpoint: a folder, or a Hugging Face id that mlx-lm downloads "
        "(default: small models with random weights, nothing is downloaded)",
    )
    parser.add_argument(
        "--kv-block-size",
        type=int,
        metavar="TOKENS",
        default=16,
        help="tokens per block, in all parts (default: %(default)s)",
    )
    add_wired_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run all parts and print what they found; 0 if every claim holds, else 1."""
    check(args.model, args.kv_block_size)
    begin, claims, not_run = time.perf_counter(), list[Claim](), dict[str, str]()
    say: Callable[[str], None] = (lambda line: None) if args.json else lambda line: print(line, flush=True)
    with wired(args.wired):
        for part in PARTS:
            say(str(part.__doc__).partition(".")[0])
            try:
                for claim in part(args):
                    say(f"  {'ok' if claim.holds else 'NO'} {claim.sentence}: {claim.measured}")
                    claims.append(claim)
            except NotRun as exc:
                not_run[part.__name__] = str(exc)
            except CommandError:  # a bad argument is the user's to correct, not a claim that failed
                raise
            except Exception as exc:  # a demo that dies halfway tells less than one that says what failed
                traceback.print_exc(file=sys.stderr)
                not_run[part.__name__] = f"stopped by {type(exc).__name__}: {exc}"
            if part.__name__ in not_run:
                say(f"  -- {not_run[part.__name__]}")
    held, seconds = sum(claim.holds for claim in claims), time.perf_counter() - begin
    holds = held == len(claims) and not not_run
    if args.json:
        told = {claim.name: claim._asdict() for claim in claims}
        facts = {"kvpool": kvpool.__version__, "holds": holds, "claims": told, "not_run": not_run}
        print(json.dumps(facts | {"seconds": round(seconds, 2)}, indent=2))
    missing = f", parts that did not run: {len(not_run)}" if not_run else ""
    say(f"{held} of {len(claims)} claims hold{missing}, {seconds:.1f} s, kvpool {kvpool.__version__}")
    return 0 if holds else 1


def check(model: str | None, block_size: int) -> None:
    """Refuse what options alone show to be wrong. Whether a Hub has the model shows when it is loaded."""
    if not 1 <= block_size <= 256:
        raise CommandError(f"--kv-block-size {block_size}: out of range, 1..256")
    if model is not None and not Path(model).exists() and model.count("/") != 1:
        raise CommandError(f"--model {model}: there is no such folder, and a Hugging Face id reads owner/name")
    if model is not None and Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise CommandError(f"--model {model}: a folder without config.json")


# ---------------------------------------------------------------------- without a model


def step_cost(args: argparse.Namespace) -> Iterator[Claim]:
    """The bookkeeping of one decode step, beside an allocator in plain Python, as tutorials have it."""
    block_size = args.kv_block_size
    lengths = np.array([CONTEXT - block_size + i % block_size for i in range(ROWS)], np.int32)
    width = -(-(CONTEXT + (ROUNDS + 2) * block_size) // block_size)
    plain = PlainAllocator(ROWS * width + 1, block_size, reserved=1)
    names = [plain.open() for _ in range(ROWS)]
    for name, num_tokens in zip(names, lengths.tolist(), strict=True):
        plain.step([name], num_tokens)
    pool = kvpool.Pool(ROWS * width + 1, block_size, max_seqs=ROWS, max_blocks_per_seq=width)
    plan = kvpool.Plan(pool, max_rows=ROWS, max_tokens=int(lengths.sum()))
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    pool.step(plan, handles, lengths)
    pool.done(plan)

    def ours() -> None:
        for _ in range(block_size):  # in which every sequence takes a block once
            pool.step(plan, handles)
            pool.done(plan)

    def theirs() -> None:
        for _ in range(block_size):
            plain.step(names)

    core, lists = least_seconds([(ours, block_size), (theirs, block_size)], ROUNDS)
    pool.step(plan, handles)
    tables, lens, slots = plain.step(names)
    same = (
        np.array_equal(plan.block_tables[:ROWS, : tables.shape[1]], tables)
        and np.array_equal(plan.seq_lens[:ROWS], lens)
        and np.array_equal(plan.slot_mapping[:ROWS], slots)
    )
    counted = f"{ROWS} sequences of {lens.min()} to {lens.max()} tokens"
    yield Claim("step_same_tables", same, "same tables, lengths and slots", counted)
    yield Claim(
        "step_cheaper",
        lists / core >= MIN_RATIO,
        f"at least {MIN_RATIO:.0f} times cheaper",
        f"{core * 1e6:.1f} us of CPU time, in Python {lists * 1e6:.0f} us, {lists / core:.0f} times as long",
    )


def out_of_blocks(args: argparse.Namespace) -> Iterator[Claim]:
    """Three sequences that grow in a pool of eight blocks."""
    pool = kvpool.Pool(9, args.kv_block_size)
    plan = kvpool.Plan(pool, max_rows=3, max_tokens=3 * args.kv_block_size)
    handles = np.array([pool.open() for _ in range(3)], np.int64)
    for _ in range(2):
        pool.step(plan, handles, args.kv_block_size)
        pool.done(plan)
    before, error = pool.fingerprint(), None
    try:
        pool.step(plan, handles, args.kv_block_size)
    except kvpool.OutOfBlocks as exc:
        error = exc
    yield Claim("out_of_blocks_raised", error is not None, "a step that does not fit raises OutOfBlocks", str(error))
    same = pool.fingerprint() == before
    yield Claim("state_unchanged", same, "and nothing has changed", f"fingerprint {before:016x} before and after")
    pool.close(int(handles[-1]))  # what a scheduler does next: preempt one sequence, go on with the rest
    pool.step(plan, handles[:2], args.kv_block_size)
    used = pool.stats().used
    yield Claim("goes_on", used == 6, "without one sequence the others go on", f"{used} blocks for two sequences")


def forks(args: argparse.Namespace) -> Iterator[Claim]:
    """Eight samples of one prompt: forks share its blocks, and copy the last one when they write."""
    from kvpool_backends import load_backend

    block_size, count = args.kv_block_size, 8
    length = 7 * block_size - block_size // 2  # its last block is partly filled, unless a block is one token
    pool = kvpool.Pool(8 + 2 * count, block_size)
    kv = load_backend()(kvpool.KVSpec(1, 1, 8, "float32", block_size=block_size), pool.num_blocks)
    plan = kvpool.Plan(pool, max_rows=count, max_tokens=max(length, count), backend=kv)

    def write(handles: Sequence[int], values: np.ndarray) -> None:
        pool.step(plan, handles, len(values) // len(handles))
        kv.copy_blocks(plan)
        k = np.repeat(values.astype(np.float32), 8).reshape(-1, 1, 8)
        kv.write(kv.prepare(plan), 0, k, k)
        pool.done(plan)

    parent = pool.open()
    write([parent], np.arange(length))
    alone = pool.stats().used
    batch = [parent, *map(int, pool.fork(parent, count - 1))]
    used, copies = pool.stats().used, pool.stats().cow_copies
    yield Claim("forks_are_free", used == alone, "a fork takes no block", f"{used} blocks for {count} sequences")
    write(batch, 1000 + np.arange(count))
    copies = pool.stats().cow_copies - copies
    expected, sentence = count - 1, "all but one copy the last block"
    if not length % block_size:
        expected, sentence = 0, "the last block is full, so nobody copies it"
    yield Claim("forks_copy_the_tail", copies == expected, sentence, f"{copies} blocks copied")
    read = [kv.gather(0, pool.table(handle), length + 1)[0][:, 0, 0] for handle in batch]
    same = sum(list(row) == [*range(length), 1000 + i] for i, row in enumerate(read))
    yield Claim("forks_read_their_own", same == count, "each reads what it wrote", f"{same} of {count} sequences")


def prefix_hits(args: argparse.Namespace) -> Iterator[Claim]:
    """One system prompt, many requests: the prefix cache."""
    block_size, count = args.kv_block_size, 16
    system, rng = list(range(6 * block_size)), np.random.default_rng(0)
    pool = kvpool.Pool(16 + 7 * count, block_size, prefix_cache=True)
    plan, prefix = kvpool.Plan(pool, max_rows=1, max_tokens=8 * block_size), pool.prefix
    assert prefix is not None

    def serve(tokens: list[int]) -> tuple[int, int]:
        handle = pool.open(tokens)
        hit = pool.num_tokens(handle)
        pool.step(plan, [handle], len(tokens) - hit)
        pool.done(plan)
        prefix.commit(handle, tokens[hit:])
        return handle, hit

    pool.close(serve(system)[0])
    served = [serve([*system, *rng.integers(0, 100, block_size).tolist()]) for _ in range(count)]
    found = sum(hit == len(system) for _, hit in served)
    yield Claim("prefix_found", found == count, "every request finds the prompt", f"{found} of {count} requests")
    used = pool.stats().used
    yield Claim("prefix_stored_once", used == 6 + count, "it is stored once", f"{used} blocks, not {7 * count}")
    known = 3 * block_size
    other = [*system[:known], 10**6, *system[known + 1 :]]
    hit = serve(other)[1]
    yield Claim("prefix_exact", hit == known, "a hit ends where tokens differ", f"{hit} of {len(other)} tokens")


def groups(args: argparse.Namespace) -> Iterator[Claim]:
    """A model of full layers and layers with a window, in one pool."""
    block_size, length = args.kv_block_size, 32 * args.kv_block_size
    kinds = [kvpool.Group.full(), kvpool.Group.window(4 * block_size)]
    pool = kvpool.Pool(80, block_size, groups=kinds)
    plan = kvpool.Plan(pool, max_rows=1, max_tokens=block_size)
    handle = pool.open()
    for _ in range(length // block_size):
        pool.step(plan, [handle], block_size)
        pool.done(plan)
    held = pool.stats().used - length // block_size
    yield Claim("window_leaves", held <= 6, "blocks behind the window are free again", f"{held} of 32 blocks are held")
    pool.close(handle)
    used = pool.stats().used
    yield Claim("groups_close", used == 0, "a close gives back those of both groups", f"{used} blocks in use")


# ---------------------------------------------------------------------- mlx-lm's engine


def greedy_tokens(args: argparse.Namespace) -> Iterator[Claim]:
    """The BatchGenerator of mlx-lm, unmodified: on kvpool, and on its own caches."""
    for label, model, tokenizer in models(args.model):
        if tokenizer is None:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, 256, n).tolist() for n in PROMPTS]
        else:
            prompts = [list(tokenizer.encode(text)) for text in TEXTS]
        stock, _ = generate(model, prompts, NEW_TOKENS)
        with pool_of(model, sum(map(len, prompts)) + NEW_TOKENS * len(prompts), len(prompts), args) as kv:
            ours, _ = generate(model, prompts, NEW_TOKENS)
            account = summary(kv)
        name, same = label.partition(" ")[0], sum(a == b for a, b in zip(stock, ours, strict=True))
        distinct = len({token for row in stock for token in row})
        yield Claim(
            f"tokens_{name}",
            same == len(prompts),
            f"{label}, same greedy tokens",
            f"{same} of {len(prompts)} prompts, {distinct} distinct tokens, attention {account.route}",
        )
        left = f"{account.blocks_used} blocks in use, {account.blocks_peak} at the peak"
        yield Claim(f"leaks_{name}", account.blocks_used == 0, "every block is back at the end", left)


def samples(args: argparse.Namespace) -> Iterator[Claim]:
    """Samples of one prompt by mlx-lm's engine: every deep copy of a cache is a fork."""
    label, model, tokenizer = models(args.model)[0]
    prompt = list(range(SAMPLE_PROMPT)) if tokenizer is None else list(tokenizer.encode("\n".join(TEXTS)))
    stock, stock_nbytes = sample(model, prompt)
    with pool_of(model, len(prompt) + SAMPLES * (len(prompt) + SAMPLE_TOKENS), SAMPLES, args) as kv:
        ours, _ = sample(model, prompt)
        account = summary(kv)
    same, distinct = sum(a == b for a, b in zip(stock, ours, strict=True)), len(set(map(tuple, stock)))
    counted = f"{same} of {SAMPLES} samples, {distinct} distinct"
    yield Claim("samples_same", same == SAMPLES, f"{label}, same samples at temperature 1", counted)
    copies = f"{account.cow_copies} blocks copied"
    yield Claim("samples_share", account.cow_copies <= SAMPLES, "at most one copy per sample", copies)
    nbytes = account.kv_nbytes_peak
    measured = f"{format_nbytes(nbytes)}, mlx-lm {format_nbytes(stock_nbytes)}"
    yield Claim("samples_bytes", nbytes < stock_nbytes, "fewer KV bytes at the peak", measured)


def models(name: str | None) -> list[tuple[str, Any, Any]]:
    """Return label, model and tokenizer of a checkpoint; or of small random models, which get random tokens."""
    try:
        from mlx_lm.models import gemma3_text

        from kvpool.adapters.mlx_lm import loading, tiny
    except ImportError as exc:
        raise NotRun(f"needs mlx and mlx-lm ({exc}): {install_command('mlx')}") from None
    if name is not None:
        try:
            return [(f"checkpoint {name}", *loading.load(name))]
        except loading.ModelNotLoaded as exc:
            raise CommandError(f"--model {exc}") from exc
    sizes = tiny.CONFIG | {"model_type": "gemma3_text", "sliding_window": 48, "sliding_window_pattern": 3}
    gemma = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(sizes | {"query_pre_attn_scalar": 32}))
    tiny.randomize(gemma)
    return [("llama with random weights", tiny.make()[0], None), ("gemma3 with windows", gemma, None)]


def generate(
    model: Any, prompts: list[list[int]], max_tokens: int, *, caches: Any = None, sampler: Any = None
) -> tuple[list[list[int]], int]:
    """Continue `prompts` with mlx-lm's engine; return the tokens of each, and the largest bytes of its caches."""
    from mlx_lm.generate import BatchGenerator

    engine = BatchGenerator(
        model, max_tokens=max_tokens, sampler=sampler, completion_batch_size=32, prefill_step_size=64
    )
    try:
        tokens: dict[int, list[int]] = {uid: [] for uid in engine.insert(prompts, caches=caches)}
        nbytes, busy = 0, True
        while busy:
            prompt_responses, responses = engine.next()
            for response in responses:
                tokens[response.uid].append(response.token)
            nbytes = max(nbytes, engine.prompt_cache_nbytes)
            busy = bool(prompt_responses or responses)
    finally:
        engine.close()
    return list(tokens.values()), nbytes


def sample(model: Any, prompt: list[int]) -> tuple[list[list[int]], int]:
    """Prefill `prompt` once, deep-copy its cache, and continue each copy at temperature 1 with the same draws."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=cache)
    mx.eval([layer.state for layer in cache])
    copies = [copy.deepcopy(cache) for _ in range(SAMPLES)]
    del cache
    mx.random.seed(0)
    last = [prompt[-1:]] * SAMPLES
    return generate(model, last, SAMPLE_TOKENS, caches=copies, sampler=mx.random.categorical)


@contextlib.contextmanager
def pool_of(model: Any, num_tokens: int, num_rows: int, args: argparse.Namespace) -> Iterator[Any]:
    """Put `model` on a pool with room for so many tokens in so many sequences.

    A model in 16 bits gathers: its tokens are compared with those of mlx-lm's own attention, and where two tokens are
    nearly as likely, two ways to round may choose different ones.
    """
    import mlx.core as mx

    from kvpool.adapters.mlx_lm import install

    num_blocks = 1 + 2 * (num_tokens // args.kv_block_size + 2 * num_rows)  # groups, and room to be wrong
    try:
        kv = install(model, num_blocks, block_size=args.kv_block_size, prefix_cache=False)
        if kv.backend.dtype != mx.float32:
            kv = install(model, num_blocks, block_size=args.kv_block_size, prefix_cache=False, fused=False)
    except (RuntimeError, ValueError) as exc:
        raise NotRun(str(exc)) from exc
    with kv:
        yield kv


def summary(kv: Any) -> Any:
    """Return the account of a pool after the engine is gone: blocks in use then were leaked."""
    gc.collect()  # caches in reference cycles are garbage, not leaks
    return kv.summary()


PARTS = (step_cost, out_of_blocks, forks, prefix_hits, groups, greedy_tokens, samples)
