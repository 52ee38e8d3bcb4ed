"""mlx-openai-server with kvpool's prompt cache.

``python examples/prompt_cache_openai_server.py launch --model-path NAME`` is the server's own command. Without
arguments its scheduler answers three chats of a tiny model, on its own cache and then on this one.
"""

import asyncio
import sys

from app.utils import prompt_cache

from kvpool.adapters.prompt_cache import PromptCache


class Prompts(PromptCache):
    """`PromptCache` with the calls of the server's cache, which has one model and says which thread made a cache."""

    def __init__(self, max_size=10, max_bytes=8 << 30, **options):
        super().__init__(max_bytes, max_size=max_size)

    def fetch_nearest_cache(self, tokens, *, allowed_sources=None):
        return super().fetch_nearest_cache("", tokens)

    def insert_cache(self, tokens, caches, *, cache_type="assistant", source=""):
        super().insert_cache("", tokens, caches, cache_type=cache_type)

    def log_cache_stats(self):
        print(self.stats_by_type())

    def close(self):
        pass


async def chats(prompts, model, tokenizer):
    """Answer three questions about one text; return the tokens, and how many of each prompt were found."""
    from app.core.batch_scheduler import BatchScheduler

    scheduler = BatchScheduler(model, tokenizer, prompt_cache=prompts)
    scheduler.start()
    text, answers, found = "You answer in short sentences, and you never guess. " * 8, [], []
    for question in ("What is a block?", "Who holds it?", "When does it leave?"):
        tokens = tokenizer.encode(text + question)
        chunks = [chunk async for chunk in scheduler.submit_stream(tokens, max_tokens=16)]
        answers.append([chunk.token for chunk in chunks])
        found.append(chunks[-1].cached_prompt_tokens)
    scheduler.stop()
    return answers, found


if __name__ == "__main__":
    own, prompt_cache.LRUPromptCache = prompt_cache.LRUPromptCache, Prompts
    if sys.argv[1:]:
        from app.cli import cli

        sys.exit(cli())
    from kvpool.adapters.mlx_lm import tiny

    for made in (own(), Prompts()):
        answers, found = asyncio.run(chats(made, *tiny.make()))
        print(f"{type(made).__name__}: found {found}, {made.nbytes} bytes, {answers}")
