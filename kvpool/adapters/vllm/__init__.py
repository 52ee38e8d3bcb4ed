"""kvpool inside vLLM, as a plugin.

    pip install kvpool
    KVPOOL_VLLM=1 vllm serve MODEL      # or VLLM_PLUGINS=kvpool

`register` is the entry point that vLLM calls in each of its processes. vLLM calls the entry points of every package
that is installed, so it does nothing, and imports nothing, unless the environment asks for it.
"""

import os


def asked_for() -> bool:
    """Whether the environment names kvpool."""
    return os.environ.get("KVPOOL_VLLM") == "1" or "kvpool" in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """Let vLLM's KV cache managers make their block pool of kvpool's blocks.

    Raises
    ------
    RuntimeError
        This release of vLLM has another block pool than the plugin knows. Nothing was changed.
    """
    if asked_for():
        from kvpool.adapters.vllm.blocks import take_place

        take_place()
