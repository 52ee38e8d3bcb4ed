"""Part (i): models whose layers differ, on mlx-lm's own caches and on one pool with layer groups."""

from __future__ import annotations

from typing import Any

from kvpool.cli.demo.models import Say, equal_rows, load_lm
from kvpool.cli.demo.report import Claim, Outcome, Part, Settings
from kvpool.config import format_nbytes

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
