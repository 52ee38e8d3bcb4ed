"""Part (h): the engine under an open loop of mixed requests, beside mlx-lm's batch engine and its prompt cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpool.cli.bench.serving.plot import draw_record
from kvpool.cli.demo.report import Claim, NotRun, Outcome, Part
from kvpool.cli.demo.settings import Settings
from kvpool.serving import Lengths, Phases, Record, Workload, find_phases, make_workload, serve_side_by_side
from kvpool.serving.metrics import summarize, usage, utilization

CHUNK = 32  # tokens of prompts in one step; of each prompt where mlx-lm's engine computes


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Serve the same requests by both at the same time, with live numbers, and draw what happened."""
    lm = load_engine(say)
    model, vocab_size = lm.load("tiny")
    work = make_requests(settings, vocab_size)
    num_blocks = settings.dense_batch * -(-work.longest // settings.block_size)
    engine = lm.EngineServer(
        *(model, num_blocks, settings.block_size, settings.open_running),
        prefill_chunk=CHUNK,
        max_step_tokens=settings.open_running + CHUNK,
    )
    block_nbytes = lm.block_nbytes(model, settings.block_size)
    stock = lm.StockServer(
        *(model, settings.dense_batch),
        prefill_chunk=CHUNK,
        block_nbytes=block_nbytes,
        shared_prefix=settings.open_prefix,
    )
    try:
        ours, theirs = serve_side_by_side([(engine, work), (stock, work)], progress=live(engine, work, say))
    finally:
        engine.close()
        stock.close()
    say("the picture of the serving engine")
    phases = find_phases(ours, settings.open_running, by="cpu")
    path = settings.out.with_stem(settings.out.stem + "-serving")
    picture(path, ours, find_phases(ours, settings.open_running), work, num_blocks, settings)
    leaked = engine.pool.stats().used
    same = sum(engine.tokens.get(number) == tokens for number, tokens in stock.tokens.items())
    return outcome(settings, work, ours, theirs, phases, same=same, leaked=leaked, path=path)


def load_engine(say: Callable[[str], None]) -> ModuleType:
    """Import what needs mlx and mlx-lm. Raises `NotRun` where that does not import."""
    say("importing mlx-lm")
    try:
        from kvpool.cli.bench.serving import lm
    except ImportError as exc:
        raise NotRun(f"needs mlx and mlx-lm ({exc}): pip install 'kvpool[mlx]'") from None
    return lm


def make_requests(settings: Settings, vocab_size: int) -> Workload:
    """Return requests with one system prompt, questions and answers of mixed length, and Poisson arrivals."""
    return make_workload(
        Lengths.parse("lognormal:24:0.7:96"),
        Lengths.parse("lognormal:28:0.7:96"),
        requests=settings.open_requests,
        rate=settings.open_rate,
        shared_prefix=settings.open_prefix,
        vocab_size=vocab_size,
        seed=settings.seed,
    )


def live(engine: Any, work: Workload, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that shows the numbers of the engine after a step of either."""
    total = 2 * work.num_tokens
    done = 0

    def show(tokens: int) -> None:
        nonlocal done
        done += tokens
        stats, blocks = engine.scheduler.stats(), engine.pool.stats()
        say(
            f"open loop, {done / total:4.0%}: {stats.prefilling + stats.decoding} running, {stats.waiting} waiting, "
            f"{stats.finished} of {len(work)} answered, {blocks.used} blocks used, {stats.hit_tokens} tokens found"
        )

    return show


def picture(path: Path, ours: Record, phases: Phases, work: Workload, num_blocks: int, settings: Settings) -> None:
    """Write the PNG. Raises `NotRun` without matplotlib."""
    try:
        draw_record(
            path,
            ours,
            phases,
            title=f"{work.name}, {ours.num_tokens:,} tokens generated",
            subtitle="kvpool's engine on a small Llama; mlx-lm's batch engine served the same at the same time",
            num_blocks=num_blocks,
            slot_blocks=-(-work.longest // settings.block_size),
        )
    except ImportError:
        raise NotRun("needs matplotlib: pip install 'kvpool[demo]'") from None


def outcome(
    settings: Settings,
    work: Workload,
    ours: Record,
    theirs: Record,
    phases: Phases,
    *,
    same: int,
    leaked: int,
    path: Path,
) -> Outcome:
    """Decide the claims."""
    mine = summarize(ours, phases) | usage(ours)
    stock = summarize(theirs, find_phases(theirs, settings.dense_batch))
    ratio = mine["tokens_per_sec"] / stock["tokens_per_sec"]
    filled = utilization(ours, settings.block_size, work.longest)
    first, stock_first = mine["ttft_ms_p50"], stock["ttft_ms_p50"]
    claims = {
        "open_loop_tokens_identical": Claim(same == len(work), f"{same} of {len(work)} answers"),
        "open_loop_more_at_once": Claim(
            mine["running_peak"] > settings.dense_batch,
            f"{mine['running_peak']}; stock {settings.dense_batch}, each as long as the longest may get",
        ),
        "open_loop_faster": Claim(
            ratio > 1,
            f"{mine['tokens_per_sec']:,.0f} tokens/s; stock {stock['tokens_per_sec']:,.0f}, {ratio:.1f} x\n"
            f"first token after {first:,.0f} ms (median); stock {stock_first:,.0f} ms",
        ),
        "open_loop_no_spikes": Claim(
            len(phases.spikes) == 0, f"{len(phases.spikes)} of {len(ours)} steps, CPU time\n{steady(phases)}"
        ),
        "open_loop_leaks_nothing": Claim(leaked == 0, f"{leaked} leaked"),
        "open_loop_drawn": Claim(path.stat().st_size > 0, str(path)),
    }
    numbers = {
        "requests": len(work),
        "picture": str(path),
        "phases": phases.as_json(),
        "utilization": filled,
        "ratio": ratio,
        "kvpool": mine,
        "stock": stock,
    }
    return Outcome(claims, numbers)


def steady(phases: Phases) -> str:
    """Return the phases in a few words."""
    parts = (f"{name} {getattr(phases, name).ticks}" for name in ("ramp", "steady", "tail"))
    return "steps: " + ", ".join(parts)


PART = Part(
    "open_loop",
    "continuous batching: the engine under an open loop, beside mlx-lm's with its prompt cache",
    {
        "open_loop_tokens_identical": "same greedy tokens as stock",
        "open_loop_more_at_once": "more sequences at once",
        "open_loop_faster": "more tokens/s",
        "open_loop_no_spikes": "no step takes 5 medians",
        "open_loop_leaks_nothing": "every block is back at the end",
        "open_loop_drawn": "the picture is written",
    },
    run,
)
