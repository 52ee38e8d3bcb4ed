"""A generation loop with a prompt cache: ``python examples/prompt_cache_loop.py [DIRECTORY]``.

Prompts are stored in the directory, if one is given. Run it twice to see the second run find them. The model is tiny
and random. You can use any model of mlx-lm in its place.
"""

import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.prompt_cache import PromptCache
from kvpool.adapters.prompt_store import store_layout
from kvpool.store import DiskStore

model, tokenizer = tiny.make()
caches = make_prompt_cache(model)
model(mx.array([[0]]), cache=caches)  # one token shows what the caches of this model are made of
layout = store_layout(caches, weights="tiny, version 1")
store = DiskStore(sys.argv[1], layout, max_nbytes=1 << 30) if sys.argv[1:] else None
if store is not None:
    store.ready.wait()
prompts = PromptCache(max_bytes=1 << 30, store=store)

text = "You answer in short sentences, and you never guess. "
for question in ("What is a block?", "Who holds it?", "When does it leave?"):
    tokens = tokenizer.encode(text := f"{text}\n{question} ")
    caches, known = prompts.fetch(tokens)
    caches = caches or make_prompt_cache(model)
    answer, new = [], tokens[known:]
    while len(answer) < 20:
        logits = model(mx.array([new]), cache=caches)
        answer.append(int(mx.argmax(logits[0, -1])))
        new = answer[-1:]
    prompts.insert([*tokens, *answer[:-1]], caches)
    text += tokenizer.decode(answer)
    print(f"{known} of {len(tokens)} tokens known: {answer}")
if store is not None:
    store.close()
