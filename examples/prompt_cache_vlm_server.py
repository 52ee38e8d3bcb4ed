"""mlx-vlm's server with kvpool's prompt cache: ``python examples/prompt_cache_vlm_server.py --model NAME``."""

from kvpool.adapters.mlx_vlm import install
from kvpool.adapters.prompt_cache import PromptCache

install(PromptCache(8 << 30))

if __name__ == "__main__":
    from mlx_vlm.server.cli import main

    main()
