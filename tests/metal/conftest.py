"""The extension for MLX, compiled once for all runs of the tests, into ``build/``."""

import fcntl
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built():
    """A folder with the extension, compiled if sources, MLX or Python have changed since the last run."""
    from kvpool_backends.mlx.native import loading
    from kvpool_backends.mlx.native.build import build

    folder = Path(__file__).parents[2] / "build" / "mlx-native"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes
        try:
            loading.open_module(folder)
        except loading.Unfit:
            build(folder)
    return folder
