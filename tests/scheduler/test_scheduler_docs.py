"""The example of docs/scheduling.md, run as it is written, over a model that notices wrong KV."""

import re
from pathlib import Path

import numpy as np
from token_model import TokenMemory, TokenModel

import kvpool

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"


def test_the_example_of_the_page_run_as_written_gives_the_tokens_of_decoding_alone():
    text = PAGE.read_text()
    example = re.search(r"\n\n((?:    .+\n)+)\n## Words", text)
    assert example, "the page no longer begins with an example"
    pool = kvpool.Pool(64, 4)
    tokens = TokenModel()
    memory = TokenMemory(tokens, 64, 4)
    prompt = np.arange(11)
    names = {
        **{name: getattr(kvpool, name) for name in ("Request", "Scheduler")},
        **{"pool": pool, "prompt": prompt, "model": memory.forward, "sample": tokens.greedy},
    }
    exec(re.sub(r"(?m)^ {4}", "", example.group(1)), names)
    (output,) = names["finished"]
    expected = tokens.solo(prompt, 100, eos=(2,))
    assert (output.tokens.tolist(), output.finish_reason) == (expected.tokens.tolist(), expected.finish_reason)
    assert pool.stats().used == 0
