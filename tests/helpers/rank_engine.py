"""One rank of mlx-lm's engine on a sharded Llama: its share of the heads, a whole pool; what it saw as a line of JSON.

    python rank_engine.py

Started by `launch.launch`. It serves twice. The second time the last rank opens a sequence of its own in a step, which
is what a scheduler does whose ranks do not see the same requests.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama

import kvpool
from kvpool.adapters.mlx_lm import PagedKV, install, tiny
from kvpool.adapters.ranks import Ranks, RanksDisagree
from kvpool.cli import demo

KV_HEADS, PROMPTS, NEW_TOKENS, NUM_BLOCKS, BLOCK_SIZE, SEED = 4, (7, 40, 18), 6, 128, 16, 0
DIVERGES = 5  # the step
TIMEOUT = 60.0  # seconds: ranks on a busy machine are slow, not gone


def state(tokens: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """Each request, its length and its last token: what mlx-lm's engine makes the next batch of."""
    return [(uid, len(known), known[-1] if known else -1) for uid, known in tokens.items()]


def serve(kv: PagedKV, ranks: Ranks, prompts: list[list[int]], diverge: int = 0) -> list[list[int]]:
    """Continue `prompts` with mlx-lm's engine, and compare pools and requests before every step."""
    engine = BatchGenerator(kv.model, max_tokens=NEW_TOKENS, prefill_batch_size=2, prefill_step_size=32)
    try:
        tokens: dict[int, list[int]] = {uid: [] for uid in engine.insert(prompts)}
        busy = True
        while busy:
            if ranks.steps + 1 == diverge and ranks.rank == ranks.size - 1:
                kv.pool.open()
            with ranks.step(kv.pool, batch=state(tokens), stream=engine.stream):
                prompt_responses, responses = engine.next()
            for response in responses:
                tokens[response.uid].append(response.token)
            busy = bool(prompt_responses or responses)
        ranks.agree(kv.pool, engine.stream)
    finally:
        engine.close()
    return list(tokens.values())


def work(group: Any) -> dict[str, Any]:
    """Serve on this rank's share of the model, and compare with the whole model on this process alone."""
    model = llama.Model(llama.ModelArgs.from_dict(tiny.CONFIG | {"num_key_value_heads": KV_HEADS}))
    tiny.randomize(model)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, 256, n).tolist() for n in PROMPTS]
    alone, _ = demo.generate(model, prompts, NEW_TOKENS)
    whole = len(model.layers) * KV_HEADS
    model.shard(group)
    pools = [kvpool.Pool(NUM_BLOCKS, BLOCK_SIZE, seed=SEED) for _ in range(2)]
    with Ranks(group, timeout=TIMEOUT) as ranks, install(model, pool=pools[0]) as kv:
        tokens = serve(kv, ranks, prompts)
        seen = {
            "same": sum(a == b for a, b in zip(tokens, alone, strict=True)),
            "of": len(prompts),
            "steps": ranks.steps,
            "digest": f"{pools[0].digest():016x}",
            "kv_heads": kv.backend.spec.num_layers * kv.backend.spec.num_kv_heads,
            "whole_kv_heads": whole,
            "leaked": demo.summary(kv).blocks_used,
            "stopped": "",
        }
    with Ranks(group, timeout=TIMEOUT) as ranks, install(model, pool=pools[1]) as kv:
        try:
            serve(kv, ranks, prompts, DIVERGES)
        except RanksDisagree as error:
            seen["stopped"] = str(error)
    return seen


if __name__ == "__main__":
    ring = mx.distributed.init(strict=True, backend="ring")
    print(f"rank {ring.rank()} saw {json.dumps(work(ring))}\nrank {ring.rank()}: done", flush=True)
