"""`kvpool.adapters.levanter` beside Levanter's own engine: CPU time of a token, of a tiny Llama on a CPU.

    pip install --pre marin-levanter gitpython
    python -m benchmarks.levanter

Both run the same greedy requests in one process and take turns. The median of the rounds counts. Levanter's engine
computes 32 tokens of a sequence before it looks at them, kvpool's plans each step on the host. Before each call,
Levanter's engine zeroes all pages: the more there are, the longer it takes.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

from kvpool.adapters.levanter import Engine

ROUNDS, PROMPT, NEW, PAGE, ROWS = 9, 32, 64, 16, 32


class NoTokenizer:
    def decode(self, tokens, **_):
        return ""


def engines(pages):
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(max_seq_len=PROMPT + NEW, **sizes)
    model = LlamaLMHeadModel.init(Axis("vocab", 128), config, key=jax.random.PRNGKey(0))
    options = InferenceEngineConfig(
        max_seq_len=PROMPT + NEW, page_size=PAGE, max_seqs=ROWS, max_pages=pages, max_seqs_in_prefill=ROWS,
        max_prefill_size=ROWS * PROMPT, compute_dtype=jnp.float32,
    )  # fmt: skip
    theirs = InferenceEngine.from_model_with_config(model, NoTokenizer(), options)
    return {"kvpool": Engine(model, NoTokenizer(), options, prefix_cache=False), "Levanter": theirs}


def requests(number):
    rng = np.random.default_rng(0)
    params = SeqDecodingParams(jnp.array(PROMPT + NEW), None, jnp.array(0.0), jnp.array(1.0), jax.random.PRNGKey(0))
    return [Request(rng.integers(0, 128, PROMPT).tolist(), k, params, 1) for k in range(number)]


def main():
    for pages in (256, 16_384):
        both = engines(pages)
        for number in (1, ROWS):
            batch, times = requests(number), {name: [] for name in both}
            tokens = [engine.generate(batch).tokens for engine in both.values()]
            assert tokens[0] == tokens[1]
            for _ in range(ROUNDS):
                for name, engine in both.items():
                    start = time.process_time()
                    engine.generate(batch)
                    times[name].append(time.process_time() - start)
            kvpool, levanter = (statistics.median(found) / NEW * 1e3 for found in times.values())
            print(
                f"{pages:6} pages, {number:2} requests: {kvpool:.2f} ms of CPU for a step, {levanter:.2f} in Levanter"
            )


if __name__ == "__main__":
    main()
