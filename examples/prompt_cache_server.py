"""mlx-lm's server with kvpool's prompt cache: ``python examples/prompt_cache_server.py --model NAME``."""

from mlx_lm import server

from kvpool.adapters.prompt_cache import PromptCache

server.LRUPromptCache = lambda size: PromptCache(8 << 30)

if __name__ == "__main__":
    server.main()
