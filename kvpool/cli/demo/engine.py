"""Part (a): mlx-lm's batch engine, unmodified, on its own cache and on the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings
from kvpool.config import format_nbytes

if TYPE_CHECKING:
    from kvpool.cli.demo.lm import Run, Summary


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
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
    same = sum(a == b for a, b in zip(stock.tokens, ours.tokens, strict=True))
    distinct = len({token for row in stock.tokens for token in row})
    claims = {
        "tokens_identical": Claim(
            same == len(lengths),
            f"{same} of {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens\n"
            f"{stock.num_tokens} tokens generated, {distinct} distinct",
        ),
        "no_blocks_leaked": Claim(
            account.blocks_used == 0, f"{account.blocks_used} leaked, {account.blocks_peak} used at the peak"
        ),
        "fewer_kv_bytes": Claim(account.kv_nbytes_peak < stock.cache_nbytes, bytes_sentence(stock, ours, account)),
    }
    numbers = {"model": workload.label, "prompt_lengths": lengths, "distinct_tokens": distinct}
    note = f"Model: {workload.label}\nAttention on kvpool: {account.route}"
    return Outcome(claims, numbers | run_numbers(stock, ours, account), (note,))


def bytes_sentence(stock: Run, ours: Run, account: Summary) -> str:
    """Return the KV bytes of both runs, the whole pool's, and MLX's own peaks, weights included."""
    return (
        f"{format_nbytes(account.kv_nbytes_peak)} (pool {format_nbytes(account.pool_nbytes)});"
        f" stock {format_nbytes(stock.cache_nbytes)}\n"
        f"all of MLX {format_nbytes(ours.mlx_peak_nbytes)}; stock {format_nbytes(stock.mlx_peak_nbytes)}"
    )


def run_numbers(stock: Run, ours: Run, account: Summary) -> dict[str, Any]:
    """Return what a stock run and a run on the pool measured, for the JSON object."""
    return {
        "tokens_generated": stock.num_tokens,
        "stock": {
            "kv_nbytes_peak": stock.cache_nbytes,
            "mlx_peak_nbytes": stock.mlx_peak_nbytes,
            "seconds": round(stock.seconds, 3),
        },
        "kvpool": {
            "attention": account.route,
            "kv_nbytes_peak": account.kv_nbytes_peak,
            "pool_nbytes": account.pool_nbytes,
            "mlx_peak_nbytes": ours.mlx_peak_nbytes,
            "blocks_peak": account.blocks_peak,
            "blocks_leaked": account.blocks_used,
            "cow_copies": account.cow_copies,
            "pool_copies_by_mlx": account.mlx_pool_copies,
            "seconds": round(ours.seconds, 3),
        },
    }


PART = Part(
    "engine",
    "mlx-lm's BatchGenerator, unmodified: on kvpool, and stock on its own cache",
    {
        "tokens_identical": "same greedy tokens as stock",
        "no_blocks_leaked": "every block is back at the end",
        "fewer_kv_bytes": "fewer KV bytes at the peak",
    },
    run,
)
