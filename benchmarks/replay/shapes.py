"""`HybridShape`: what a model keeps, and the layer groups that are made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.groups import Group
from kvpool.sizing import LayerGroup, layer_groups

IDLE = 0.05
"""Share of the bytes of an entry that may belong to no layer."""

_SLIDING, _FULL = "sliding_attention", "full_attention"

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **{"dtype": "bfloat16", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24},
            **{"num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16},
            **{"linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
            "linear_conv_kernel_dim": 4,
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {
            **{"model_type": "gemma4_text", "dtype": "bfloat16", "hidden_size": 5376, "num_hidden_layers": 60},
            **{"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
            **{"num_kv_shared_layers": 0, "attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512},
            **{"sliding_window": 1024, "layer_types": ([_SLIDING] * 5 + [_FULL]) * 10},
        },
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", "dtype": "bfloat16", "hidden_size": 2880, "num_hidden_layers": 24},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        "layer_types": [_SLIDING, _FULL] * 12,
    },
}
"""Configs that have a name here: Qwen3.5 27B, Gemma 4 31B, gpt-oss 20B; what decides about the bytes."""


@dataclass(frozen=True)
class HybridShape:
    """What a model keeps, in blocks of one arena."""

    layers: tuple[LayerGroup, ...]
    block_size: int  # tokens of a base block
    block_nbytes: int  # of a block of the arena
    groups: tuple[Group, ...]  # those of blocks, in the order of `layers`; all states are one group, the last one

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in full attention, which lets nothing go."""
        return sum(layers.token_nbytes for layers in self.layers if layers.kind == "full")

    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent states of a sequence."""
        return sum(layers.state_nbytes for layers in self.layers)

    @property
    def tail_nbytes(self) -> int:
        """Bytes of the windows and chunks of a long sequence."""
        return sum(layers.size * layers.token_nbytes for layers in self.layers if layers.size is not None)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes that a hit needs besides the entries of full attention."""
        return self.state_nbytes + self.tail_nbytes

    @property
    def grain(self) -> int:
        """Tokens that a hit is a multiple of."""
        return max((group.block_size or self.block_size for group in self.groups), default=self.block_size)

    def names(self) -> tuple[str, ...]:
        """Return a name per group: ``full``, ``window 1024``, ``state``."""
        return tuple(f"{group.kind} {group.size}" if self._is_bounded(group) else group.kind for group in self.groups)

    def entry_blocks(self, index: int) -> int:
        """Return the blocks of an entry of a group, or of a checkpoint of its states."""
        group = self.groups[index]
        return group.blocks if group.kind == "state" else group.columns

    def entry_tokens(self, index: int) -> int:
        """Return the tokens of an entry."""
        return self.groups[index].block_size or self.block_size

    @staticmethod
    def _is_bounded(group: Group) -> bool:
        return group.kind in ("window", "chunk")


def hybrid_shape(model: Mapping[str, Any] | str | os.PathLike[str], block_size: int, rows: int) -> HybridShape:
    """Return the shape of a model: a name of `MODELS`, or what `kvpool.sizing.layer_groups` reads.

    `rows`: sequences that run at a time.

    Layers with smaller tokens have blocks of 2 or 4 times the tokens, where that makes the bytes equal.
    """
    config = MODELS.get(model, model) if isinstance(model, str) else model
    layers = layer_groups(config)
    kept = [group for group in layers if group.kind != "state"]
    widths = [group.token_nbytes // len(group.layers) for group in kept]
    times = [max(widths) // width if max(widths) in (2 * width, 4 * width) else 1 for width in widths]
    entries = [group.token_nbytes * block_size * factor for group, factor in zip(kept, times, strict=True)]
    state_nbytes = sum(group.state_nbytes for group in layers)
    nbytes = _block_nbytes(entries) if entries else state_nbytes
    groups = [
        Group(
            group.kind,
            group.size or 0,
            group.kept,
            block_size * factor,
            columns=-(-entry // nbytes),
        )
        for group, factor, entry in zip(kept, times, entries, strict=True)
    ]
    if state_nbytes:
        groups.append(Group.state(2 * rows, blocks=-(-state_nbytes // nbytes)))
    return HybridShape(layers, block_size, nbytes, tuple(groups))


def _block_nbytes(entries: list[int]) -> int:
    """Return the largest size of a block for which at most `IDLE` of the bytes of each entry belong to no layer."""
    smallest = min(entries)
    sizes = (smallest // parts for parts in range(1, smallest + 1))
    return next(size for size in sizes if all(-(-entry // size) * size * (1 - IDLE) <= entry for entry in entries))
