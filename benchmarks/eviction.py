"""What an eviction policy takes of a decode step: a batch under mlx-lm's engine, on a llama with random weights.

Every row holds as many tokens as its budget, so that each evicts once in `slack` steps. The policy's share is the time
inside it, what it has seen taken over, what leaves chosen and moved; scores are exported by the attention kernel, whose
part `benchmarks.attention --part scores` measures.
"""

import statistics
import sys
import time

import numpy as np
from mlx_lm.generate import BatchGenerator

from benchmarks import serving_lm as lm
from benchmarks.command import main
from benchmarks.gate import Gate
from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

SHARE_MAX = 0.05
PASSES = 3
SEED = 1
OPTIONS = {
    **{"model": ("medium", "a llama"), "rows": (4, "sequences"), "tokens": (512, "of each")},
    "steps": (128, "that are measured"),
}


def policies(budget):
    """Name -> policy; None: everything is kept."""
    return {
        "everything kept": None,
        "H2O": H2O(max_kv=budget),
        "H2O, raw": H2O(max_kv=budget, kind="raw"),
        "blocks": BlockEviction(max_kv=budget),
        "window": SlidingWindow(max_kv=budget),
    }


class Stopwatch:
    """Seconds inside the policy, while it is a context."""

    def __init__(self):
        self.seconds, self.originals = 0.0, {name: getattr(Eviction, name) for name in ("run", "begin_pass")}

    def __enter__(self):
        for name, original in self.originals.items():
            setattr(Eviction, name, self.timed(original))
        return self

    def __exit__(self, *exc):
        for name, original in self.originals.items():
            setattr(Eviction, name, original)

    def timed(self, original):
        def call(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def decode(model, policy, rows, tokens, steps):
    """(seconds of a decode step, seconds of it inside the policy), means over the steps."""
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(1, 1000, tokens).tolist() for _ in range(rows)]
    blocks = 2 * rows * -(-(tokens + steps + 64) // 16)
    with install(model, num_blocks=blocks, eviction=policy), Stopwatch() as watch:
        engine = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=rows, prefill_step_size=tokens)
        engine.insert(prompts, [steps + 8] * rows)
        begun = 0
        while begun < 4:  # the prompts, and steps until caches are warm
            begun += len(engine.next()[1]) == rows
        watch.seconds, begin = 0.0, time.perf_counter()
        for _ in range(steps):
            engine.next()
        return (time.perf_counter() - begin) / steps, watch.seconds / steps


def gates(options):
    """A gate for each policy, medians of the passes; policies take turns."""
    model, _ = lm.load(options.model)
    sizes = options.rows, options.tokens, options.steps
    made = policies(options.tokens)
    times = {name: [] for name in made}
    for _ in range(PASSES):
        for name, policy in made.items():
            times[name].append(decode(model, policy, *sizes))
    for name in made:
        step = statistics.median(step for step, _ in times[name])
        share = statistics.median(inside / step for step, inside in times[name])
        yield Gate(name, share, SHARE_MAX, at_most=True, note=f"{step * 1e3:.2f} ms a step")


if __name__ == "__main__":
    sys.exit(main())
