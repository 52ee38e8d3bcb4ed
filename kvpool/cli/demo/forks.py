"""Part (b): one prompt, many samples, through `copy.deepcopy` of the cache as hosts of mlx-lm do it."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.cli.demo.engine import bytes_sentence, run_numbers
from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
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
    same = sum(a == b for a, b in zip(stock.tokens, ours.tokens, strict=True))
    distinct = len(set(map(tuple, stock.tokens)))
    copies_per_token = account.cow_copies / ours.num_tokens
    claims = {
        "samples_identical": Claim(same == samples, f"{same} of {samples} samples, {distinct} distinct"),
        "prompt_shared": Claim(
            account.blocks_peak <= need,
            f"{account.blocks_peak} blocks at the peak, {samples * longest} without sharing",
        ),
        "forks_copy_one_block": Claim(
            account.cow_copies <= samples,
            f"{account.cow_copies} blocks copied, {copies_per_token:.3f} per generated token",
        ),
        "fork_fewer_kv_bytes": Claim(account.kv_nbytes_peak < stock.cache_nbytes, bytes_sentence(stock, ours, account)),
        "fork_no_blocks_leaked": Claim(account.blocks_used == 0, f"{account.blocks_used} leaked"),
    }
    numbers = run_numbers(stock, ours, account)
    numbers["stock"]["deepcopy_us"] = round(stock_seconds / samples * 1e6, 1)
    numbers["kvpool"]["deepcopy_us"] = round(our_seconds / samples * 1e6, 1)
    numbers["kvpool"]["cow_copies_per_token"] = round(copies_per_token, 5)
    return Outcome(claims, {"samples": samples, "prompt_length": len(prompt), "distinct": distinct} | numbers)


PART = Part(
    "forks",
    "one prompt, many samples: every deep copy of the cache is a fork",
    {
        "samples_identical": "same samples as stock",
        "prompt_shared": "samples share prompt blocks",
        "forks_copy_one_block": "at most one copy per sample",
        "fork_fewer_kv_bytes": "fewer KV bytes at the peak",
        "fork_no_blocks_leaked": "every block is back at the end",
    },
    run,
)
