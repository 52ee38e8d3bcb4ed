"""Part (a): mlx-lm's batch engine, unmodified, on its own cache and on the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings
from kvpool.config import format_nbytes


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Generate greedily from prompts of mixed length, twice, and compare tokens and bytes."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    lengths = [len(prompt) for prompt in workload.prompts]
    say(f"BatchGenerator on mlx-lm's cache: {workload.label}")
    stock = lm.generate(workload.model, workload.prompts, settings.new_tokens)
    say(f"BatchGenerator on kvpool: {workload.label}")
    blocks = sum(-(-(n + settings.new_tokens) // settings.block_size) for n in lengths)
    with lm.installed(workload.model, settings, blocks) as paged:
        ours = lm.generate(workload.model, workload.prompts, settings.new_tokens)
        used = lm.pool_use(paged)
    same = sum(a == b for a, b in zip(stock.tokens, ours.tokens, strict=True))
    distinct = len({token for row in stock.tokens for token in row})
    claims = {
        "tokens_identical": Claim(
            same == len(lengths),
            f"{same} of {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens,"
            f" {stock.num_tokens} tokens generated, {distinct} distinct",
        ),
        "no_blocks_leaked": Claim(used.leaked == 0, f"{used.leaked} blocks leaked, peak {used.peak_blocks}"),
        "fewer_kv_bytes": Claim(
            used.peak_bytes < stock.cache_bytes,
            bytes_sentence(stock, used),
        ),
    }
    return Outcome(
        claims, {"model": workload.label, "prompt_lengths": lengths} | run_numbers(stock, ours, used)
    )


def bytes_sentence(stock: Any, used: Any) -> str:
    """Return the KV bytes of both runs, and what the whole pool takes, as a sentence."""
    return (
        f"{format_nbytes(used.peak_bytes)} in blocks (the whole pool: {format_nbytes(used.pool_bytes)}),"
        f" {format_nbytes(stock.cache_bytes)} in mlx-lm's cache"
    )


def run_numbers(stock: Any, ours: Any, used: Any) -> dict[str, Any]:
    """Return what a stock run and a run on the pool measured, for the JSON object."""
    return {
        "tokens_generated": stock.num_tokens,
        "stock": {
            "cache_nbytes": stock.cache_bytes,
            "mlx_peak_nbytes": stock.mlx_peak_bytes,
            "seconds": round(stock.seconds, 3),
        },
        "kvpool": {
            "peak_blocks": used.peak_blocks,
            "peak_nbytes": used.peak_bytes,
            "pool_nbytes": used.pool_bytes,
            "mlx_peak_nbytes": ours.mlx_peak_bytes,
            "cow_copies": used.cow_copies,
            "leaked_blocks": used.leaked,
            "seconds": round(ours.seconds, 3),
        },
    }


PART = Part(
    "engine",
    "mlx-lm's BatchGenerator, unmodified, on kvpool",
    {
        "tokens_identical": "greedy tokens equal to mlx-lm's own cache",
        "no_blocks_leaked": "every block is back at the end",
        "fewer_kv_bytes": "fewer KV bytes at the peak",
    },
    run,
)
