"""Adapters under another release of their framework: what is said names the one found and those tested."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.adapters import warn_if_untested

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, files, code):
    """Run `code` in a process that sees these files before any installed package; returns its stderr."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stderr.strip()


STOCK = {
    "torch.py": "class Tensor: pass",
    "transformers/__init__.py": "__version__ = '5.99.0'",
    "transformers/generation/__init__.py": "",
    "transformers/generation/continuous_batching/__init__.py": "",
    "transformers/generation/continuous_batching/cache_allocators.py": (
        "FULL_ATTENTION, SLIDING_ATTENTION = 'full_attention', 'sliding_attention'\n"
        "class FullAttentionCacheAllocator: pass\nclass SlidingAttentionCacheAllocator: pass"
    ),
    "transformers/generation/continuous_batching/cache.py": (
        "from .cache_allocators import *\nATTN_TYPE_TO_ALLOCATOR = {FULL_ATTENTION: FullAttentionCacheAllocator, "
        "SLIDING_ATTENTION: SlidingAttentionCacheAllocator}"
    ),
    "transformers/generation/continuous_batching/input_outputs.py": (
        "class ContinuousBatchingIOs:\n    def prepare_batch_tensors(self): pass"
    ),
}


INSTALL = "from kvpool.adapters.transformers import install\nwith install(): pass"


def jax_of(version, tree_util):
    return {"jax/__init__.py": f"__version__ = '{version}'", "jax/numpy.py": "", "jax/tree_util.py": tree_util}


TABLE = "from kvpool.adapters.jax import PageTable\nPageTable(8, 4, 2, 2, 4)"
RANKS = (
    "from kvpool.adapters.ranks import Ranks\n"
    "class Group:\n    def rank(self): return 0\n    def size(self): return 1\n"
    "with Ranks(Group()): pass"
)
OTHERS = {  # files of another release, what uses it, what is said of it
    "jax": (
        jax_of("0.11.0", "def register_dataclass(cls): return cls"),
        *(TABLE, "[PageTable] jax 0.11.0 is installed, tested with >= 0.10, < 0.11"),
    ),
    "mlx": (
        {"mlx/__init__.py": "", "mlx/core.py": "__version__ = '0.20.0'"},
        *(RANKS, "[Ranks] mlx 0.20.0 is installed, tested with >= 0.31.2, < 0.33"),
    ),
}
OLD = {"torch.py": "class Tensor: pass", "transformers/__init__.py": "__version__ = '4.40.0'"}


@pytest.mark.parametrize("name", OTHERS)
def test_framework_of_another_release_is_used_with_a_warning(tmp_path, name):
    files, code, said = OTHERS[name]
    assert run(tmp_path, files, code) == said


def test_transformers_without_the_calls_that_a_pool_answers_is_refused(tmp_path):
    warned, *_, error = run(tmp_path, STOCK, INSTALL).splitlines()
    assert warned == "[install] transformers 5.99.0 is installed, tested with >= 5.22.2, < 5.25"
    assert error.startswith("RuntimeError: [install] transformers 5.99.0 has changed register_cache_tensor, get_seqlen")


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("transformers", OLD, "transformers 4.40.0 is installed, the adapter was tested with >= 5.22.2, < 5.25: No"),
        ("jax", jax_of("0.4.20", ""), "jax 0.4.20 is installed, the adapter was tested with >= 0.10, < 0.11: cannot"),
    ],
)
def test_framework_that_is_too_old_to_be_imported_names_both_releases(tmp_path, name, files, said):
    error = run(tmp_path, files, f"import kvpool.adapters.{name}").splitlines()[-1]
    assert error.startswith(f"ImportError: [kvpool.adapters] {said}")


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [
        *((found, True) for found in ("0.32.2", "0.32.10", "0.32.4.dev2026+abc")),
        *((found, False) for found in ("0.32.1", "0.33", "0.33.0rc1", "1.0", "unknown")),
    ],
)
def test_releases_are_compared_by_numbers_not_letters(caplog, found, is_tested):
    warn_if_untested("call", "mlx", found, "0.32.2", "0.33")
    said = f"[call] mlx {found} is installed, tested with >= 0.32.2, < 0.33"
    assert [record.getMessage() for record in caplog.records] == ([] if is_tested else [said])
