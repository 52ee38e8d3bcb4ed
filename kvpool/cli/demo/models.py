"""Parts (a), (b), (f), (g) and (h): models of mlx-lm, unmodified, on its own caches and on a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part, Settings
from kvpool.config import format_nbytes
from kvpool.errors import install_command
from kvpool.eviction import H2O

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


# ---------------------------------------------------------------------- (a) an engine


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

# ---------------------------------------------------------------------- (b) forks


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

# ---------------------------------------------------------------------- (f) a shared prompt


def run_shared_prompt(settings: Settings, say: Say) -> Outcome:
    """Serve requests that begin alike from mlx-lm's cache, each from cold, and from the prefix cache."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    model, system, count, begun = workload.model, workload.long_prompt, settings.shared_requests, workload.prompts
    n = len(begun)  # the questions are the beginnings of two prompts each, all different
    prompts = [system + begun[(i + 1 + i // n) % n][:4] + begun[i % n][:28] for i in range(count)]
    say(f"{count} requests with one system prompt on mlx-lm's cache")
    stock = lm.generate(model, prompts, settings.sample_tokens, together=count)
    say(f"{count} requests with one system prompt on kvpool's prefix cache")
    block_size = settings.block_size
    shared = len(system) // block_size  # its whole blocks
    blocks = sum(-(-(len(prompt) + settings.sample_tokens) // block_size) for prompt in prompts)
    with lm.install_pool(model, blocks + count + 1, block_size, prefix_cache=True) as kv:  # room to be wrong
        ours, held = lm.generate_shared(kv, system, prompts, settings.sample_tokens)
        account = lm.account(kv)
    same = equal_rows(stock.tokens, ours.tokens)
    claims = {
        "shared_tokens_identical": Claim(
            same == count,
            f"{same} of {count} requests\n{ours.num_tokens} tokens generated, {ours.num_distinct} distinct",
        ),
        "prompt_stored_once": Claim(held == shared, f"{held} blocks for all, {count * shared} without sharing"),
        "prompt_found": Claim(
            account.hit_tokens == count * shared * block_size,
            f"{account.hit_tokens} of {account.query_tokens} prompt tokens, not computed",
        ),
        "shared_fewer_kv_bytes": fewer_bytes(stock, ours, account),
        "shared_no_blocks_leaked": Claim(
            account.blocks_used == 0, f"{account.blocks_used} leaked, {account.blocks_cached} kept until needed"
        ),
    }
    numbers = {"requests": count, "system_prompt": len(system), "shared_blocks": shared}
    return Outcome(claims, numbers | run_numbers(stock, ours, account))


SHARED_PROMPT = Part(
    "shared_prompt",
    "one system prompt, many requests: the prefix cache",
    {
        "shared_tokens_identical": "same greedy tokens as cold",
        "prompt_stored_once": "the prompt is stored once",
        "prompt_found": "every request finds it",
        "shared_fewer_kv_bytes": "fewer KV bytes at the peak",
        "shared_no_blocks_leaked": "every block is back at the end",
    },
    run_shared_prompt,
)

# ---------------------------------------------------------------------- (g) attention


def run_attention(settings: Settings, say: Say) -> Outcome:
    """Decode the same batch by both routes, from the same contexts; compare tokens and median CPU times."""
    lm = load_lm(say)
    rows, context, steps = settings.attention_rows, settings.attention_context, settings.attention_steps
    model = lm.random_llama(head_dim=64, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4)
    results = {}
    for route in ("gather", "fused"):
        say(f"{steps} decode steps of {rows} rows, {context} tokens each: {route}")
        results[route] = lm.decode(model, rows, context, steps, settings.block_size, fused=route == "fused")
    (gathered, gather_ms), (fused, fused_ms) = results["gather"], results["fused"]
    same, ratio = equal_rows(gathered, fused), gather_ms / fused_ms
    distinct = len({token for row in fused for token in row})
    claims = {
        "fused_tokens_identical": Claim(
            same == rows, f"{same} of {rows} rows\n{rows * steps} tokens, {distinct} distinct"
        ),
        "fused_faster": Claim(
            ratio > 1,
            f"median {fused_ms:.1f} ms of CPU time; gather {gather_ms:.1f} ms, {ratio:.1f} x\n"
            f"{rows} rows of {context} tokens, 16/4 heads of 64",
        ),
    }
    times = {"gather_step_ms": gather_ms, "fused_step_ms": fused_ms, "ratio": ratio}
    return Outcome(claims, {"rows": rows, "context": context, "steps": steps} | times)


ATTENTION = Part(
    "attention",
    "one decode step of a Llama on MLX's CPU, all of it: attention over the blocks",
    {
        "fused_tokens_identical": "same greedy tokens as gathering",
        "fused_faster": "faster than gathering",
    },
    run_attention,
)

# ---------------------------------------------------------------------- (h) a long conversation


def run_conversation(settings: Settings, say: Say) -> Outcome:
    """Let one model talk without a limit, then hear the same words with little room: by H2O, and by rotating."""
    lm = load_lm(say)
    workload = lm.make_workload(settings)
    model, length, budget = workload.model, settings.talk_tokens, settings.talk_budget
    say(f"{length} tokens without a limit")
    whole = lm.talk(model, workload.long_prompt[:1], length, None)
    say(f"the same within {budget} tokens, rotating")
    rotating = lm.talk(model, whole.tokens, length, lm.rotating_cache(model, budget))
    num_blocks = 2 * (length // settings.block_size + 2)
    with lm.install_pool(model, num_blocks, settings.block_size, fused=True) as kv:
        try:
            caches = kv.make_cache(H2O(max_kv=budget))
        except ValueError as error:
            raise NotRun(str(error)) from None
        say(f"the same within {budget} tokens, H2O")
        h2o = lm.talk(model, whole.tokens, length, caches)
        positions = lm.positions_held(caches)
        position, peak = caches[0].offset, lm.account(kv).blocks_peak
        roomy = lm.talk(model, whole.tokens, length, kv.make_cache(H2O(max_kv=2 * length)))
        unlimited = lm.talk(model, whole.tokens, length, kv.make_cache())
        del caches
    older = int((positions < length - budget).sum(axis=-1).min()) - H2O(max_kv=budget).sink
    like = {name: talk.share_like(whole) for name, talk in (("h2o", h2o), ("rotating", rotating))}
    equal = equal_rows(roomy.logits, unlimited.logits)
    claims = {
        "budget_held": Claim(
            h2o.most_held <= budget and peak <= -(-budget // settings.block_size) + 1,  # a part of a block may be gone
            f"{h2o.most_held} tokens, {peak} blocks at most; {-(-length // settings.block_size)} without a limit",
        ),
        "positions_go_on": Claim(position == length, f"position {position} after {length} tokens"),
        "remembers_older": Claim(
            older > 0, f"at least {older} tokens per head are older than what a window of {budget} holds"
        ),
        "room_changes_nothing": Claim(
            equal == length and roomy.choices == unlimited.choices, f"{equal} of {length} logits, bit by bit"
        ),
        "one_block_more_than_rotating": Claim(
            h2o.nbytes <= rotating.nbytes * (1 + settings.block_size / budget),
            f"{h2o.nbytes / 1024:.0f} against {rotating.nbytes / 1024:.0f} KiB",
        ),
    }
    numbers = {"tokens": length, "budget": budget, "blocks_peak": peak, "older_tokens": older, "like_unlimited": like}
    numbers["nbytes"] = {"unlimited": whole.nbytes, "rotating": rotating.nbytes, "h2o": h2o.nbytes}
    note = (
        f"next words as without a limit: {like['h2o']:.0%} by H2O, {like['rotating']:.0%} rotating; the weights are"
        " random: docs/numbers.md has a trained model"
    )
    return Outcome(claims, numbers, (note,))


CONVERSATION = Part(
    "conversation",
    "a long conversation in a fixed budget: H2O beside rotating",
    {
        "budget_held": "the budget holds at every step",
        "positions_go_on": "positions go on past the budget",
        "remembers_older": "heavy hitters outlive a window",
        "room_changes_nothing": "a budget not reached changes no bit",
        "one_block_more_than_rotating": "at most one block more than rotating",
    },
    run_conversation,
)


MODELS = {"hybrid": "qwen3_5", "window": "gemma3_text"}
"""Tiny models by what they are: recurrent layers beside attention, and sliding windows beside full layers."""

MOST_AGAIN = 48  # tokens that two prompts share and that the second one may compute again


def run_layers(settings: Settings, say: Say) -> Outcome:
    """Generate greedily with each model, alone and in a batch, by stock and on a pool."""
    lm = load_lm(say)
    numbers: dict[str, Any] = {}
    for name, arch in MODELS.items():
        say(f"{arch}: stock, then kvpool")
        numbers[name] = lm.compare_layers(arch, settings)
    turn = lm.second_turn(MODELS["hybrid"], settings)
    again = turn["computed"] - (turn["prompt"] - turn["shared"])
    is_same = turn["tokens"]["kvpool"] == turn["tokens"]["stock"]
    rows = len(settings.prompt_lengths)

    def equal(name: str, one: str, other: str) -> int:
        return equal_rows(numbers[name]["tokens"][one], numbers[name]["tokens"][other])

    def claim_of(one: str, other: str) -> Claim:
        found = {name: equal(name, one, other) for name in MODELS}
        text = ", ".join(f"{name} {count} of {rows} requests" for name, count in found.items())
        return Claim(all(count == rows for count in found.values()), text)

    pairs = {name: (facts["nbytes"]["kvpool"], facts["nbytes"]["stock"]) for name, facts in numbers.items()}
    claims = {
        "layers_tokens_identical": claim_of("batch", "stock"),
        "layers_batch_is_alone": claim_of("batch", "alone"),
        "layers_fewer_bytes": Claim(
            all(ours < theirs for ours, theirs in pairs.values()),
            "\n".join(f"{name} {format_nbytes(a)}; stock {format_nbytes(b)}" for name, (a, b) in pairs.items()),
        ),
        "layers_turn_computes_what_is_new": Claim(
            is_same and 0 <= again <= MOST_AGAIN,
            f"{again} tokens again of {turn['shared']} that the prompts share{'' if is_same else ', other tokens'}",
        ),
        "layers_no_blocks_leaked": Claim(
            not any(facts["blocks_left"] for facts in numbers.values()),
            ", ".join(f"{name} {facts['blocks_left']} blocks" for name, facts in numbers.items()),
        ),
    }
    for facts in numbers.values():
        del facts["tokens"]
    numbers["turn"] = {name: turn[name] for name in ("prompt", "shared", "computed")}
    notes = tuple(f"{name}: {arch}, {numbers[name]['layers']}" for name, arch in MODELS.items())
    return Outcome(claims, numbers, notes)


PART = Part(
    "layers",
    "models with recurrent layers and with windows, in one pool each",
    {
        "layers_tokens_identical": "tokens are those of stock mlx-lm, one request at a time",
        "layers_batch_is_alone": "a batch gives the tokens of each request alone",
        "layers_fewer_bytes": "KV and states take fewer bytes than stock's batch",
        "layers_turn_computes_what_is_new": "the second turn of a hybrid computes what is new",
        "layers_no_blocks_leaked": "no block is left behind",
    },
    run_layers,
)
