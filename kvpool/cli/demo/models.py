"""The parts with a model of mlx-lm: its engine, unmodified, on its own caches and on a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part, Settings
from kvpool.config import format_nbytes
from kvpool.errors import install_command

if TYPE_CHECKING:
    from kvpool.cli.demo.lm import Run, Summary


Say = Callable[[str], None]


def load_lm(say: Say) -> ModuleType:
    """Import `kvpool.cli.demo.lm`, which needs mlx and mlx-lm.

    Raises
    ------
    NotRun
        If one of them is missing or does not import.
    """
    say("importing mlx-lm")
    try:
        from kvpool.cli.demo import lm
    except ImportError as exc:
        raise NotRun(f"needs mlx and mlx-lm ({exc}): {install_command('mlx')}") from None
    return lm


def equal_rows(one: list[Any], other: list[Any]) -> int:
    """Return how many rows are the same on both sides."""
    return sum(a == b for a, b in zip(one, other, strict=True))


def fewer_bytes(stock: Run, ours: Run, account: Summary) -> Claim:
    """Compare the KV bytes of both runs; the whole pool's and MLX's own peaks, weights included, are shown."""
    return Claim(
        account.kv_nbytes_peak < stock.cache_nbytes,
        f"{format_nbytes(account.kv_nbytes_peak)} (pool {format_nbytes(account.pool_nbytes)});"
        f" stock {format_nbytes(stock.cache_nbytes)}\n"
        f"all of MLX {format_nbytes(ours.mlx_peak_nbytes)}; stock {format_nbytes(stock.mlx_peak_nbytes)}",
    )


def run_numbers(stock: Run, ours: Run, account: Summary) -> dict[str, Any]:
    """Return what a stock run and a run on the pool measured, for the JSON object."""
    theirs, mine = stock.numbers, ours.numbers
    del mine["kv_nbytes_peak"]  # the account has it: of blocks, not of what caches say
    return {
        "tokens_generated": stock.num_tokens,
        "stock": theirs,
        "kvpool": asdict(account) | mine | {"attention": account.route},
    }


# ---------------------------------------------------------------------- an engine


def run_engine(settings: Settings, say: Say) -> Outcome:
    """Generate greedily from prompts of mixed length, twice, and compare tokens and bytes."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    model, prompts, new_tokens = workload.model, workload.prompts, settings.new_tokens
    say(f"BatchGenerator on mlx-lm's cache: {workload.label}")
    stock = lm.generate(model, prompts, new_tokens)
    say(f"BatchGenerator on kvpool: {workload.label}")
    lengths = [len(prompt) for prompt in prompts]
    blocks = sum(-(-(length + new_tokens) // settings.block_size) for length in lengths)
    with lm.install_pool(model, blocks + len(prompts) + 1, settings.block_size) as kv:
        ours = lm.generate(model, prompts, new_tokens)
        account = lm.account(kv)
    same = equal_rows(stock.tokens, ours.tokens)
    claims = {
        "tokens_identical": Claim(
            same == len(lengths),
            f"{same} of {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens\n"
            f"{stock.num_tokens} tokens generated, {stock.num_distinct} distinct",
        ),
        "no_blocks_leaked": Claim(
            account.blocks_used == 0, f"{account.blocks_used} leaked, {account.blocks_peak} used at the peak"
        ),
        "fewer_kv_bytes": fewer_bytes(stock, ours, account),
    }
    numbers = {"model": workload.label, "prompt_lengths": lengths, "distinct_tokens": stock.num_distinct}
    note = f"Model: {workload.label}\nAttention on kvpool: {account.route}"
    return Outcome(claims, numbers | run_numbers(stock, ours, account), (note,))


ENGINE = Part(
    "engine",
    "mlx-lm's BatchGenerator, unmodified: on kvpool, and stock on its own cache",
    {
        "tokens_identical": "same greedy tokens as stock",
        "no_blocks_leaked": "every block is back at the end",
        "fewer_kv_bytes": "fewer KV bytes at the peak",
    },
    run_engine,
)

# ---------------------------------------------------------------------- forks


def run_forks(settings: Settings, say: Say) -> Outcome:
    """Sample one prompt many times from mlx-lm's cache and from the pool, with the same random numbers."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    model, prompt, samples = workload.model, workload.long_prompt, settings.samples
    arguments = (model, prompt, samples, settings.sample_tokens, settings.seed)
    say(f"{samples} samples of one prompt on mlx-lm's cache")
    stock, stock_seconds = lm.sample(*arguments)
    say(f"{samples} samples of one prompt on kvpool")
    whole = -(-len(prompt) // settings.block_size)  # blocks of the prompt
    longest = -(-(len(prompt) + settings.sample_tokens) // settings.block_size)  # blocks of one whole sample
    own = longest - (len(prompt) - 1) // settings.block_size  # of which a sample does not share so many
    need = whole + samples * own
    with lm.install_pool(model, 2 * need, settings.block_size) as kv:  # room to be wrong
        ours, our_seconds = lm.sample(*arguments)
        account = lm.account(kv)
    same, distinct = equal_rows(stock.tokens, ours.tokens), len(set(map(tuple, stock.tokens)))
    copies, peak = account.cow_copies, account.blocks_peak
    claims = {
        "samples_identical": Claim(same == samples, f"{same} of {samples} samples, {distinct} distinct"),
        "prompt_shared": Claim(peak <= need, f"{peak} blocks at the peak, {samples * longest} without sharing"),
        "forks_copy_one_block": Claim(
            copies <= samples, f"{copies} blocks copied, {copies / ours.num_tokens:.3f} per generated token"
        ),
        "fork_fewer_kv_bytes": fewer_bytes(stock, ours, account),
        "fork_no_blocks_leaked": Claim(account.blocks_used == 0, f"{account.blocks_used} leaked"),
    }
    numbers = run_numbers(stock, ours, account)
    for name, seconds in (("stock", stock_seconds), ("kvpool", our_seconds)):
        numbers[name]["deepcopy_us"] = round(seconds / samples * 1e6, 1)
    return Outcome(claims, {"samples": samples, "prompt_length": len(prompt), "distinct": distinct} | numbers)


FORKS = Part(
    "forks",
    "one prompt, many samples: every deep copy of the cache is a fork",
    {
        "samples_identical": "same samples as stock",
        "prompt_shared": "samples share prompt blocks",
        "forks_copy_one_block": "at most one copy per sample",
        "fork_fewer_kv_bytes": "fewer KV bytes at the peak",
        "fork_no_blocks_leaked": "every block is back at the end",
    },
    run_forks,
)
