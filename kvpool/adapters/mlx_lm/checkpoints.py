"""`Checkpoints`: copies of states in blocks of a pool. A prefix hit loads its state, and does not compute it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.layout import Layout
from kvpool.adapters.mlx_lm.shapes import state_shapes
from kvpool.adapters.mlx_lm.states import Held


class Checkpoints:
    """Executes the ``state_loads`` and ``state_saves`` of plans, bit by bit.

    A checkpoint is a bundle of blocks of arena 0. Its bytes are those of all arrays of all states of a sequence, one
    after the other; what is left of the last block is 0. docs/prefix.md says when a pool asks for loads and saves.

    Parameters
    ----------
    layout : Layout
    store
        Has ``export_blocks`` and ``import_blocks`` for arena 0, as a `KVBackend` has.
    """

    def __init__(self, layout: Layout, store: Any) -> None:
        self._layout = layout
        self._store = store

    def loaded(self, plan: Any) -> tuple[list[int], Held]:
        """Return the slots that a plan loads, and what they hold, row by row. To be called before the first layer."""
        bundles = self._bundles(plan, "state_loads")
        if not len(bundles):
            return [], {}
        blocks = bundles[:, 1:]
        data = self._store.export_blocks(blocks.ravel()).reshape(len(bundles), -1)
        held: Held = {}
        begin = 0
        for leaf in self._layout.held:
            held[leaf] = []
            for array in self._layout.leaves[leaf].arrays:
                if array is None:
                    held[leaf].append(None)
                    continue
                part = mx.array(np.ascontiguousarray(data[:, begin : begin + array.nbytes]))
                held[leaf].append(part.view(array.dtype).reshape(len(bundles), *array.shape))
                begin += array.nbytes
        return bundles[:, 0].tolist(), held

    def save(self, plan: Any, read: Callable[[Sequence[int]], Held]) -> None:
        """Fill the bundles that a plan saves. To be called after the last layer.

        `read` returns what slots hold after the pass.

        Raises
        ------
        TypeError
            The arrays of a state differ from those of the model when it was traced.
        """
        bundles = self._bundles(plan, "state_saves")
        if not len(bundles):
            return
        held = read(bundles[:, 0].tolist())
        parts: list[mx.array] = []
        for leaf in self._layout.held:
            found, due = state_shapes(held[leaf]), self._layout.leaves[leaf].arrays
            if found != due:
                raise TypeError(
                    f"[forward] the state of cache {leaf} has arrays {found}, it had {due} when the model was traced: "
                    "after a model was cast, call install again, or make a new engine"
                )
            parts += [x.reshape(len(bundles), -1).view(mx.uint8) for x in held[leaf] if x is not None]
        mx.eval(parts)
        data = np.zeros((len(bundles), (bundles.shape[1] - 1) * self._layout.block_nbytes[0]), np.uint8)
        begin = 0
        for part in parts:
            data[:, begin : begin + part.shape[1]] = np.asarray(part)
            begin += part.shape[1]
        self._store.import_blocks(bundles[:, 1:].ravel(), data.reshape(-1, self._layout.block_nbytes[0]))

    def _bundles(self, plan: Any, name: str) -> np.ndarray:
        """Return (slot, blocks) of each load or save, int32 ``[K, 1 + blocks]``."""
        if self._layout.checkpoint_blocks == 0:
            return np.zeros((0, 1), np.int32)
        bundles: np.ndarray = getattr(plan.groups[self._layout.state_group], name)
        return bundles
