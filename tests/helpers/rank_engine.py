"""One rank of mlx-lm's engine on a sharded Llama: its share of the heads, a whole pool; what it saw as a line of JSON.

    python rank_engine.py [--diverge STEP]

Started by `launch.launch`. With ``--diverge`` the last rank opens a sequence of its own in that step, which is what a
scheduler does whose ranks do not see the same requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

import kvpool
from kvpool.adapters.mlx_lm import PagedKV, install
from kvpool.adapters.ranks import RankLost, Ranks, RanksDisagree
from kvpool.cli.demo import lm

KV_HEADS, PROMPTS, NEW_TOKENS, NUM_BLOCKS, BLOCK_SIZE, SEED = 4, (7, 40, 95, 18), 24, 128, 16, 0
TIMEOUT = 60.0  # seconds: ranks on a busy machine are slow, not gone


def state(tokens: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """Each request, its length and its last token: what mlx-lm's engine makes the next batch of."""
    return [(uid, len(known), known[-1] if known else -1) for uid, known in tokens.items()]


def serve(kv: PagedKV, ranks: Ranks, prompts: list[list[int]], diverge: int | None) -> list[list[int]]:
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


def work(group: Any, diverge: int | None) -> dict[str, Any]:
    """Serve on this rank's share of the model, and compare with the whole model on this process alone."""
    mx.random.seed(SEED)
    model = lm.random_llama(num_key_value_heads=KV_HEADS)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, lm.VOCABULARY, n).tolist() for n in PROMPTS]
    alone = lm.generate(model, prompts, NEW_TOKENS).tokens
    whole = len(model.layers) * KV_HEADS
    model.shard(group)
    pool = kvpool.Pool(NUM_BLOCKS, BLOCK_SIZE, seed=SEED)
    with Ranks(group, timeout=TIMEOUT) as ranks, install(model, pool=pool) as kv:
        tokens = serve(kv, ranks, prompts, diverge)
        return {
            "same": sum(a == b for a, b in zip(tokens, alone, strict=True)),
            "of": len(prompts),
            "steps": ranks.steps,
            "digest": f"{pool.digest():016x}",
            "kv_heads": kv.backend.spec.num_layers * kv.backend.spec.num_kv_heads,
            "whole_kv_heads": whole,
            "leaked": lm.account(kv).blocks_used,
        }


def main() -> int:
    """Run one rank and print what it saw; its last line tells whether it came to the end."""
    parser = argparse.ArgumentParser(prog="rank_engine")
    parser.add_argument("--diverge", type=int)
    args = parser.parse_args()
    group = mx.distributed.init(strict=True, backend="ring")
    try:
        seen = work(group, args.diverge)
    except (RanksDisagree, RankLost) as error:
        print(f"rank {group.rank()} stopped: {error}", flush=True)
        return 0  # mlx.launch ends the other ranks when one fails, before they can say why they stopped
    print(f"rank {group.rank()} saw {json.dumps(seen)}\nrank {group.rank()}: done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
