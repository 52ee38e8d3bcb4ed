"""Part (i): one long conversation within a fixed budget, by H2O on the pool beside mlx-lm's rotating cache."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings
from kvpool.eviction import H2O


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Let one model talk without a limit, then hear the same words with little room, in both ways."""
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
    most = -(-budget // settings.block_size)
    same_words = f"{h2o.share_like(whole):.0%} by H2O, {rotating.share_like(whole):.0%} rotating"
    equal = sum(a == b for a, b in zip(roomy.logits, unlimited.logits, strict=True))
    claims = {
        "budget_held": Claim(
            h2o.most_held <= budget and peak <= most,
            f"{h2o.most_held} tokens, {peak} blocks at most; {-(-length // settings.block_size)} without a limit",
        ),
        "positions_go_on": Claim(position == length, f"position {position} after {length} tokens"),
        "remembers_older": Claim(
            older > 0, f"at least {older} tokens per head are older than what a window of {budget} holds"
        ),
        "room_changes_nothing": Claim(
            equal == length and roomy.choices == unlimited.choices,
            f"{equal} of {length} logits, bit by bit",
        ),
        "no_more_bytes_than_rotating": Claim(
            h2o.nbytes <= rotating.nbytes, f"{h2o.nbytes / 1024:.0f} against {rotating.nbytes / 1024:.0f} KiB"
        ),
    }
    numbers = {
        "tokens": length,
        "budget": budget,
        "blocks_peak": peak,
        "older_tokens": older,
        "like_unlimited": {"h2o": h2o.share_like(whole), "rotating": rotating.share_like(whole)},
        "nbytes": {"unlimited": whole.nbytes, "rotating": rotating.nbytes, "h2o": h2o.nbytes},
    }
    note = f"next words as without a limit: {same_words}; the weights are random: docs/quality.md has a trained model"
    return Outcome(claims, numbers, (note,))


PART = Part(
    "conversation",
    "a long conversation in a fixed budget: H2O beside rotating",
    {
        "budget_held": "the budget holds at every step",
        "positions_go_on": "positions go on past the budget",
        "remembers_older": "heavy hitters outlive a window",
        "room_changes_nothing": "a budget not reached changes no bit",
        "no_more_bytes_than_rotating": "no more KV bytes than rotating",
    },
    run,
)
