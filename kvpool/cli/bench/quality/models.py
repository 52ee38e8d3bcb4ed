"""All that knows MLX: checkpoints, and what a model says about tokens, one by one, on a cache of any policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


def save(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Write a checkpoint as mlx-lm reads it: ``config.json`` and ``model.safetensors``."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(w) for name, w in weights.items()})
