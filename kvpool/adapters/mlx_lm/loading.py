"""Models by name, for the command line: a folder, a repository of the Hugging Face Hub, or ``tiny``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.host import layout_on, make_storage
from kvpool.adapters.mlx_lm.layout import MOST_CHECKPOINTS
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.config import blocks_for, format_nbytes, memory_for


class ModelNotLoaded(Exception):
    """There is no such model, or it cannot be loaded. The message is one line."""


def load(name: str, arch: str | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer, as ``mlx_lm.load`` gives them. `arch` is that of the tiny model.

    Raises
    ------
    ModelNotLoaded
        No such folder, no network to get it by, or nothing that mlx-lm can load.
    """
    if name == tiny.NAME:
        return tiny.make(arch)
    check_name(name)
    try:
        model, tokenizer = mlx_lm.load(name)[:2]
    except Exception as error:  # of the network, the hub, json, safetensors, transformers, mlx: whatever is in the way
        text = " ".join(str(error).split())
        raise ModelNotLoaded(f"{name}: {type(error).__name__}: {text[:200]}") from error
    return model, tokenizer


def check_name(name: str) -> None:
    """Raise ModelNotLoaded for what can be seen without loading anything: no folder, nor the name of a repository."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotLoaded(f"{name}: a folder without config.json")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ModelNotLoaded(f"{name}: no such folder, and no repository of the form owner/name")


def blocks_in(
    memory: int | str, model: Any, block_size: int, num_rows: int, *, beside: Any = None, **quantization: int | None
) -> int:
    """Return the `num_blocks` of `install` for which `memory` holds the pool, see `kvpool.config.blocks_for`.

    Parameters
    ----------
    num_rows : int
        Sequences that run at a time. Their states are taken off first, twice: a pass holds those before and after it.
    beside : optional
        Another model, whose pool holds as many tokens in the same memory.
    quantization
        As for `install`.

    Raises
    ------
    ValueError
        The states leave no memory for blocks.
    """
    import mlx.core as mx

    shape = inspect_model(model)
    layout = layout_on(make_storage, shape, block_size, False, **quantization)
    info = dict(mx.device_info()) if mx.metal.is_available() else None
    machine: dict[str, Any] = {"device_info": info, "active_nbytes": mx.get_active_memory()}
    counts = [layout.columns(arena) for arena in range(len(layout.block_nbytes))]
    within = [
        1 + (blocks_for(memory, spec, **machine).num_blocks - 1) // counts[arena]
        for spec, arena in zip(layout.specs, layout.arenas, strict=True)
    ] or [1 + MOST_CHECKPOINTS]
    reserved = sum(layout.block_nbytes)
    nbytes = max(1, sum(count * one for count, one in zip(counts, layout.block_nbytes, strict=True)))
    states, budget = 2 * num_rows * shape.state_nbytes, memory_for(memory, **machine)
    if states and states + reserved + nbytes > budget:
        raise ValueError(
            f"[memory] the states of {num_rows} sequences take {format_nbytes(states)} in a pass, and blocks need "
            f"{format_nbytes(reserved + nbytes)} at least; there are {format_nbytes(budget)}: run fewer at a time"
        )
    most = min(1 + (budget - states - reserved) // nbytes, *within)
    if beside is not None:
        other = blocks_in(memory, beside, block_size, num_rows)
        most = most * other // (most + other)
    return max(2, most)

