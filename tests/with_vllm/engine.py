"""Runs of vLLM's engine on the CPU, in a process of their own.

    python engine.py CASE ..                what each run did, a line of JSON
    python engine.py --store DIR CASE ..    with kvpool's store in DIR behind the engine

The engine, its scheduler and its models are vLLM's; the weights are random, from a seed. Whether its block pool is
kvpool's, the environment says.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1"
)
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

VOCABULARY = 512
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
HYBRID = dict(sliding_window=96, layer_types=["sliding_attention"] * 3 + ["full_attention"])
MODELS = {
    "full": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=96)),
    "hybrid": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **HYBRID)),
}
#: model, blocks, tokens in a step, requests, what else
CASES = {
    "shared": ("full", 400, 2048, 60, {}),
    "tight": ("full", 40, 2048, 40, {}),
    "chunked": ("full", 400, 128, 20, {}),
    "samples": ("full", 200, 2048, 16, {"n": 3, "temperature": 1.0, "seed": 7}),
    "aborts": ("full", 100, 512, 30, {}),
    "window": ("window", 120, 512, 30, {}),
    "hybrid": ("hybrid", 160, 512, 30, {}),
    "uncached": ("full", 40, 512, 20, {}),
}


def save(kind: str, folder: Path) -> None:
    torch.manual_seed(5)
    MODELS[kind]().save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    ).save_pretrained(folder)


def engine(kind, folder, store=None, role="kv_both", **options):
    """vLLM's engine for a tiny model in a folder, which is made."""
    save(kind, Path(folder))
    if store is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVPoolConnector", "kv_role": role,
            "kv_connector_module_path": "kvpool.adapters.vllm.connector",
            "kv_connector_extra_config": {"path": str(store), "max_nbytes": 10**9},
        }  # fmt: skip
    sizes = {"block_size": 32, "max_num_seqs": 32, "max_model_len": 1024} | options
    return LLM(
        model=str(folder), dtype="float32", enforce_eager=True, disable_log_stats=True, seed=0, **sizes
    ).llm_engine  # fmt: skip


def scheduler_of(one):
    return one.engine_core.engine_core.scheduler


def serve(one, requests: int, sampling=(), aborts: bool = False) -> list:
    """Requests that share their beginnings, all followed to their end; some are aborted."""
    rng = random.Random(11)
    shared = [[rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(64, 400))] for _ in range(6)]
    told: dict = {}
    waiting = list(range(requests))
    step = 0
    while waiting or one.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.randrange(6))):
            tail = [rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, 80))]
            params = {"max_tokens": rng.randrange(4, 64), "ignore_eos": True, "temperature": 0.0, **dict(sampling)}
            prompt = {"prompt_token_ids": rng.choice(shared) + tail}
            one.add_request(str(waiting.pop(0)), prompt, SamplingParams(**params))
        for output in one.step():
            tokens = sorted((sample.index, list(sample.token_ids)) for sample in output.outputs)
            told[output.request_id] = tokens, output.num_cached_tokens
        step += 1
        if aborts and step % 3 == 0:
            one.abort_request([str(rng.randrange(requests - len(waiting)))])
    return sorted(told.items())


def run(case: str, store=None) -> dict:
    kind, blocks, budget, requests, sampling = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        one = engine(
            kind, folder, store, num_gpu_blocks_override=blocks, enable_prefix_caching=case != "uncached",
            max_num_batched_tokens=budget, enable_chunked_prefill=True,
        )  # fmt: skip
        scheduler = scheduler_of(one)
        preempted = []
        stock = scheduler._preempt_request

        def preempt(request, *args, **kwargs):
            preempted.append(request.request_id.split("-")[0])
            return stock(request, *args, **kwargs)

        scheduler._preempt_request = preempt
        answers = serve(one, requests, sampling, aborts=case == "aborts")
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    found = {"pool": type(pool).__name__, "answers": answers, "preempted": preempted, "free": free}
    if store is not None:
        found["store"] = scheduler.connector.store.stats()["disk"]._asdict()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store")
    parser.add_argument("cases", nargs="+", choices=CASES)
    asked = parser.parse_args()
    for named in asked.cases:
        print("RESULT " + json.dumps([named, run(named, asked.store)]), flush=True)
