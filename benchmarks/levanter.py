"""`kvpool.adapters.levanter` beside Levanter's own engine: CPU time of a token, of a tiny Llama on a CPU.

    pip install --pre marin-levanter gitpython
    python -m benchmarks.levanter

Both run the same greedy requests in one process and take turns. The median of the rounds counts. Levanter's engine
computes up to 32 tokens of a sequence before the host looks at them, kvpool's plans each step on the host. Levanter's
engine gets as many requests as it can run, and zeroes all pages before each call: the more, the longer it takes.
kvpool's gets all requests in one call.
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


def requests(number, shortest):
    """Requests with answers of `shortest` to `NEW` tokens."""
    rng = np.random.default_rng(0)
    lengths = PROMPT + rng.integers(shortest, NEW + 1, number)
    params = [
        SeqDecodingParams(jnp.array(length), None, jnp.array(0.0), jnp.array(1.0), jax.random.PRNGKey(0))
        for length in lengths.tolist()
    ]
    return [Request(rng.integers(0, 128, PROMPT).tolist(), k, params[k], 1) for k in range(number)]


def generate(engine, batch):
    size = len(batch) if isinstance(engine, Engine) else ROWS
    calls = [engine.generate(batch[first : first + size]) for first in range(0, len(batch), size)]
    return [tokens for result in calls for tokens in result.tokens]


def main():
    for pages in (256, 16_384):
        both = engines(pages)
        for number, shortest in ((1, NEW), (ROWS, NEW), (8 * ROWS, 1)):
            batch, times = requests(number, shortest), {name: [] for name in both}
            tokens = [generate(engine, batch) for engine in both.values()]
            assert tokens[0] == tokens[1]
            for _ in range(ROUNDS):
                for name, engine in both.items():
                    start = time.process_time()
                    generate(engine, batch)
                    times[name].append(time.process_time() - start)
            kvpool, levanter = (statistics.median(found) / sum(map(len, tokens[0])) * 1e6 for found in times.values())
            what = f"{pages:6} pages, {number:3} requests of {shortest:2} to {NEW} tokens"
            print(f"{what}: {kvpool:6.0f} us for a token, {levanter:6.0f} in Levanter")


if __name__ == "__main__":
    main()
