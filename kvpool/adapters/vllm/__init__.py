"""kvpool inside vLLM, as a plugin: ``KVPOOL_VLLM=1 vllm serve MODEL``. docs/embedding.md is the page.

vLLM calls the entry points of every package that is installed, so `register` does nothing, and imports nothing, unless
the environment asks for it.
"""

import os


def register() -> None:
    """Let vLLM's KV cache managers make their block pool of kvpool's blocks.

    Raises
    ------
    RuntimeError
        This release of vLLM has another block pool than the plugin knows. Nothing was changed.
    """
    if os.environ.get("KVPOOL_VLLM") == "1" or "kvpool" in os.environ.get("VLLM_PLUGINS", "").split(","):
        from kvpool.adapters.vllm.blocks import take_place

        take_place()
