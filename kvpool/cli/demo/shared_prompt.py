"""Part (f): one system prompt, many requests: it is computed once, stored once, and found by all of them."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.cli.demo.engine import bytes_sentence, run_numbers
from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Serve requests that begin alike from mlx-lm's cache, each from cold, and from the prefix cache."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    model, system, count = workload.model, workload.long_prompt, settings.shared_requests
    prompts = [system + question for question in make_questions(workload.prompts, count)]
    say(f"{count} requests with one system prompt on mlx-lm's cache")
    stock = lm.generate(model, prompts, settings.sample_tokens, together=count)
    say(f"{count} requests with one system prompt on kvpool's prefix cache")
    block_size = settings.block_size
    shared = len(system) // block_size  # its whole blocks
    blocks = sum(-(-(len(prompt) + settings.sample_tokens) // block_size) for prompt in prompts)
    with lm.install_pool(model, blocks + count + 1, block_size, prefix_cache=True) as kv:  # room to be wrong
        ours, held = lm.generate_shared(kv, system, prompts, settings.sample_tokens)
        account = lm.account(kv)
    same = sum(a == b for a, b in zip(stock.tokens, ours.tokens, strict=True))
    distinct = len({token for row in ours.tokens for token in row})
    claims = {
        "shared_tokens_identical": Claim(
            same == count,
            f"{same} of {count} requests\n{ours.num_tokens} tokens generated, {distinct} distinct",
        ),
        "prompt_stored_once": Claim(held == shared, f"{held} blocks for all, {count * shared} without sharing"),
        "prompt_found": Claim(
            account.hit_tokens == count * shared * block_size,
            f"{account.hit_tokens} of {account.query_tokens} prompt tokens, not computed",
        ),
        "shared_fewer_kv_bytes": Claim(
            account.kv_nbytes_peak < stock.cache_nbytes, bytes_sentence(stock, ours, account)
        ),
        "shared_no_blocks_leaked": Claim(
            account.blocks_used == 0, f"{account.blocks_used} leaked, {account.blocks_cached} kept until needed"
        ),
    }
    numbers = run_numbers(stock, ours, account)
    numbers["kvpool"] |= {"query_tokens": account.query_tokens, "hit_tokens": account.hit_tokens}
    return Outcome(claims, {"requests": count, "system_prompt": len(system), "shared_blocks": shared} | numbers)


def make_questions(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return `count` different short questions, each from the beginnings of two prompts."""
    n = len(prompts)
    return [prompts[(i + 1 + i // n) % n][:4] + prompts[i % n][:28] for i in range(count)]


PART = Part(
    "shared_prompt",
    "one system prompt, many requests: the prefix cache",
    {
        "shared_tokens_identical": "same greedy tokens as cold",
        "prompt_stored_once": "the prompt is stored once",
        "prompt_found": "every request finds it",
        "shared_fewer_kv_bytes": "fewer KV bytes at the peak",
        "shared_no_blocks_leaked": "every block is back at the end",
    },
    run,
)
