"""The parts of the whole demo with a model of mlx-lm, beside those of `kvpool.cli.demo.models`."""

from __future__ import annotations

from typing import Any

from benchmarks.demo.settings import AllSettings
from kvpool.cli.console import NotRun
from kvpool.cli.demo.models import Say, equal_rows, fewer_bytes, load_lm, run_numbers
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.config import format_nbytes
from kvpool.eviction import H2O

# ---------------------------------------------------------------------- a shared prompt


def run_shared_prompt(settings: AllSettings, say: Say) -> Outcome:
    """Serve requests that begin alike from mlx-lm's cache, each from cold, and from the prefix cache."""
    lm = load_lm(say)
    from benchmarks.demo import lm as more

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
        ours, held = more.generate_shared(kv, system, prompts, settings.sample_tokens)
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

# ---------------------------------------------------------------------- a long conversation


def run_conversation(settings: AllSettings, say: Say) -> Outcome:
    """Let one model talk without a limit, then hear the same words with little room: by H2O, and by rotating."""
    lm = load_lm(say)
    from benchmarks.demo import lm as more

    workload = lm.make_workload(settings)
    model, length, budget = workload.model, settings.talk_tokens, settings.talk_budget
    say(f"{length} tokens without a limit")
    whole = more.talk(model, workload.long_prompt[:1], length, None)
    say(f"the same within {budget} tokens, rotating")
    rotating = more.talk(model, whole.tokens, length, more.rotating_cache(model, budget))
    num_blocks = 2 * (length // settings.block_size + 2)
    with lm.install_pool(model, num_blocks, settings.block_size, fused=True) as kv:
        try:
            caches = kv.make_cache(H2O(max_kv=budget))
        except ValueError as error:
            raise NotRun(str(error)) from None
        say(f"the same within {budget} tokens, H2O")
        h2o = more.talk(model, whole.tokens, length, caches)
        positions = more.positions_held(caches)
        position, peak = caches[0].offset, lm.account(kv).blocks_peak
        roomy = more.talk(model, whole.tokens, length, kv.make_cache(H2O(max_kv=2 * length)))
        unlimited = more.talk(model, whole.tokens, length, kv.make_cache())
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

# ---------------------------------------------------------------------- layers that differ

MODELS = {"hybrid": "qwen3_5", "window": "gemma3_text"}
"""Tiny models by what they are: recurrent layers beside attention, and sliding windows beside full layers."""

MOST_AGAIN = 48  # tokens that two prompts share and that the second one may compute again


def run_layers(settings: AllSettings, say: Say) -> Outcome:
    """Generate greedily with each model, alone and in a batch, by stock and on a pool."""
    load_lm(say)
    from benchmarks.demo import lm as more

    numbers: dict[str, Any] = {}
    for name, arch in MODELS.items():
        say(f"{arch}: stock, then kvpool")
        numbers[name] = more.compare_layers(arch, settings)
    turn = more.second_turn(MODELS["hybrid"], settings)
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


LAYERS = Part(
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
