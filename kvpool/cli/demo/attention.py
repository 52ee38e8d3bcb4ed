"""Part (g): one decode step of a model, gathering every context for MLX's attention, and attending over the blocks."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.cli.demo.report import Claim, Outcome, Part, load_lm
from kvpool.cli.demo.settings import Settings


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Decode the same batch by both routes, from the same contexts; compare tokens and median CPU times."""
    lm = load_lm(say)
    rows, context, steps = settings.attention_rows, settings.attention_context, settings.attention_steps
    model = lm.random_llama(head_dim=64, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4)
    results = {}
    for route in ("gather", "fused"):
        say(f"{steps} decode steps of {rows} rows, {context} tokens each: {route}")
        results[route] = lm.decode(model, rows, context, steps, settings.block_size, fused=route == "fused")
    gather, fused = results["gather"], results["fused"]
    same = sum(a == b for a, b in zip(gather.tokens, fused.tokens, strict=True))
    distinct = len({token for row in fused.tokens for token in row})
    ratio = gather.median_ms / fused.median_ms
    claims = {
        "fused_tokens_identical": Claim(
            same == rows, f"{same} of {rows} rows\n{rows * steps} tokens, {distinct} distinct"
        ),
        "fused_faster": Claim(
            ratio > 1,
            f"median {fused.median_ms:.1f} ms of CPU time; gather {gather.median_ms:.1f} ms, {ratio:.1f} x\n"
            f"{rows} rows of {context} tokens, 16/4 heads of 64",
        ),
    }
    numbers = {"rows": rows, "context": context, "steps": steps, "ratio": ratio}
    times = {route: {"step_ms": result.median_ms, "steps_ms": result.ms} for route, result in results.items()}
    return Outcome(claims, numbers | times)


PART = Part(
    "attention",
    "one decode step of a Llama on MLX's CPU, all of it: attention over the blocks",
    {
        "fused_tokens_identical": "same greedy tokens as gathering",
        "fused_faster": "faster than gathering",
    },
    run,
)
