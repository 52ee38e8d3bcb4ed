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
    prompt, samples = workload.long_prompt, settings.samples
    args = (workload.model, prompt, samples, settings.sample_tokens, settings.seed)
    say(f"{samples} samples of one prompt on mlx-lm's cache")
    stock, stock_seconds = lm.sample(*args)
    say(f"{samples} samples of one prompt on kvpool")
    shared, whole = len(prompt) // settings.block_size, -(-len(prompt) // settings.block_size)
    longest = -(-(len(prompt) + settings.sample_tokens) // settings.block_size)
    with lm.installed(workload.model, settings, shared + (samples + 1) * (longest - shared)) as paged:
        ours, our_seconds = lm.sample(*args)
        used = lm.pool_use(paged)
    same = sum(a == b for a, b in zip(stock.tokens, ours.tokens, strict=True))
    distinct = len(set(map(tuple, stock.tokens)))
    unshared = samples * longest
    claims = {
        "samples_identical": Claim(
            same == samples, f"{same} of {samples} samples, {distinct} of them distinct"
        ),
        "prompt_shared": Claim(
            used.peak_blocks <= whole + samples * (longest - shared),
            f"peak {used.peak_blocks} blocks, {unshared} if each sample had its own prompt",
        ),
        "forks_copy_one_block": Claim(
            used.cow_copies <= samples,
            f"{used.cow_copies} blocks copied for {ours.num_tokens} tokens,"
            f" {used.cow_copies / ours.num_tokens:.3f} per token",
        ),
        "fork_fewer_kv_bytes": Claim(used.peak_bytes < stock.cache_bytes, bytes_sentence(stock, used)),
        "fork_no_blocks_leaked": Claim(used.leaked == 0, f"{used.leaked} blocks leaked"),
    }
    numbers = run_numbers(stock, ours, used)
    numbers["stock"]["deepcopy_seconds"] = round(stock_seconds, 6)
    numbers["kvpool"]["deepcopy_seconds"] = round(our_seconds, 6)
    numbers["kvpool"]["cow_copies_per_token"] = used.cow_copies / ours.num_tokens
    return Outcome(claims, {"samples": samples, "prompt_length": len(prompt), "distinct": distinct} | numbers)


PART = Part(
    "forks",
    "one prompt, many samples: forks of the cache instead of copies",
    {
        "samples_identical": "samples equal to those from mlx-lm's deep copies",
        "prompt_shared": "the samples share the prompt's blocks",
        "forks_copy_one_block": "each sample copies one block at most",
        "fork_fewer_kv_bytes": "fewer KV bytes at the peak",
        "fork_no_blocks_leaked": "every block is back at the end",
    },
    run,
)
