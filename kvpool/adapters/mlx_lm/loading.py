"""Models by name, for the command line: a folder, a repository of the Hugging Face Hub, or ``tiny``."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx_lm
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.host import layout_on, make_storage
from kvpool.adapters.mlx_lm.layout import MOST_CHECKPOINTS
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.config import blocks_of_arenas, format_nbytes, memory_for
from kvpool.sizing import ArenaSize


class ModelNotLoaded(Exception):
    """There is no such model, or it cannot be loaded. The message is one line."""


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer, as ``mlx_lm.load`` gives them.

    Raises
    ------
    ModelNotLoaded
        No such folder, no network to get it by, or nothing that mlx-lm can load.
    """
    if name == tiny.NAME:
        return tiny.make()
    check_name(name)
    try:
        model, tokenizer = mlx_lm.load(name)[:2]
    except Exception as error:  # of the network, the hub, json, safetensors, transformers, mlx: whatever is in the way
        raise ModelNotLoaded(f"{name}: {_why(error)}") from error
    return model, tokenizer


def _why(error: Exception) -> str:
    """Return why a model cannot be loaded, in one line."""
    if isinstance(error, GatedRepoError):
        return "the Hugging Face Hub gives this model only to accounts with access: ask for it there, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face Hub has no such model, or shows it only with an HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        return "it is not in the local cache, and the Hugging Face Hub cannot be reached"
    return f"{type(error).__name__}: {shorten(str(error), 200, placeholder=' ...')}"


def check_name(name: str) -> None:
    """Raise ModelNotLoaded for what can be seen without loading anything: no folder, nor the name of a repository."""
    folder = Path(name)
    try:
        is_there = folder.exists()
    except OSError as error:  # it is longer than the system allows
        raise ModelNotLoaded(f"{name:.80}: {error.strerror}") from None
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotLoaded(f"{name}: a folder without config.json")
    if not is_there and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ModelNotLoaded(f"{name}: no such folder, and no repository of the form owner/name")


def keeps_every_token(model: Any) -> bool:
    """Return whether some layer keeps every token, so that the blocks of a pool limit the length of a sequence."""
    return any(group.kind == "full" for group in layout_on(make_storage, inspect_model(model), 1, False).groups)


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
        There is no memory for two blocks, or the states leave none.
    """
    import mlx.core as mx

    shape = inspect_model(model)
    layout = layout_on(make_storage, shape, block_size, False, **quantization)
    info = dict(mx.device_info()) if mx.metal.is_available() else None
    machine: dict[str, Any] = {"device_info": info, "active_nbytes": mx.get_active_memory()}
    arenas = [
        ArenaSize(tuple(spec for (spec,) in layout.columns_of(arena)), layout.columns(arena), max(1, nbytes))
        for arena, nbytes in enumerate(layout.block_nbytes)
    ]
    states, budget = 2 * num_rows * shape.state_nbytes, memory_for(memory, **machine)
    most = blocks_of_arenas(budget - states, arenas, info)
    if most < 2:
        least = format_nbytes(sum((1 + arena.columns) * arena.block_nbytes for arena in arenas))
        need = f"blocks need {least} at least; there are {format_nbytes(budget)}"
        if not states:
            raise ValueError(f"[memory] no usable block: {need}")
        taken = f"the states of {num_rows} sequences take {format_nbytes(states)} in a pass"
        raise ValueError(f"[memory] {taken}, and {need}: run fewer at a time")
    if not layout.specs:
        most = min(most, 1 + MOST_CHECKPOINTS)
    if beside is not None:
        other = blocks_in(memory, beside, block_size, num_rows)
        most = most * other // (most + other)
    return max(2, most)
