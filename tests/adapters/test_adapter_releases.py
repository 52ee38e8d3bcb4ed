"""Adapters under another release of their framework: the error names what was found and what was tested."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.adapters.releases import require

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, files, code):
    """Run `code` in a process that sees these files before any installed package; returns its last line of stderr."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return result.stderr.strip().splitlines()[-1] if result.returncode else result.stdout.strip()


def test_transformers_without_its_private_modules_names_both_releases(tmp_path):
    files = {"torch.py": "class Tensor: pass", "transformers/__init__.py": "__version__ = '4.40.0'"}
    error = run(tmp_path, files, "import kvpool.adapters.transformers")
    assert error.startswith(
        "ImportError: [kvpool.adapters] transformers 4.40.0 is installed, the adapter was tested with 5.23.0: No module"
    )


STOCK = {
    "torch.py": "class Tensor: pass",
    "transformers/__init__.py": "__version__ = '5.24.0'",
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


@pytest.mark.parametrize("strict", [True, False])
def test_transformers_that_still_has_them_is_refused_unless_strict_is_false(tmp_path, strict):
    code = f"from kvpool.adapters.transformers import install\nwith install(strict={strict}): print('tried')"
    refusal = "RuntimeError: [install] transformers 5.24.0 is installed, tested with 5.23.0; see strict=False"
    assert run(tmp_path, STOCK, code) == (refusal if strict else "tried")


def test_jax_that_is_too_old_names_both_releases(tmp_path):
    files = {
        "jax/__init__.py": "__version__ = '0.4.20'",
        "jax/numpy.py": "",
        "jax/tree_util.py": "",
    }
    error = run(tmp_path, files, "import kvpool.adapters.jax")
    assert error.startswith(
        "ImportError: [kvpool.adapters] jax 0.4.20 is installed, the adapter was tested with >= 0.10, < 0.11: cannot"
    )


@pytest.mark.parametrize("strict", [True, False])
def test_jax_that_is_too_new_is_refused_unless_strict_is_false(tmp_path, strict):
    files = {
        "jax/__init__.py": "__version__ = '0.11.0'",
        "jax/numpy.py": "",
        "jax/tree_util.py": "def register_dataclass(cls): return cls",
    }
    code = f"from kvpool.adapters.jax import PageTable\nPageTable(8, 4, 2, 2, 4, strict={strict}); print('tried')"
    refusal = "RuntimeError: [PageTable] jax 0.11.0 is installed, tested with >= 0.10, < 0.11; see strict=False"
    assert run(tmp_path, files, code) == (refusal if strict else "tried")


@pytest.mark.parametrize("strict", [True, False])
def test_mlx_of_another_release_is_refused_by_ranks_unless_strict_is_false(tmp_path, strict):
    files = {"mlx/__init__.py": "", "mlx/core.py": "__version__ = '0.20.0'"}
    code = (
        "from kvpool.adapters.ranks import Ranks\n"
        "class Group:\n    def rank(self): return 0\n    def size(self): return 1\n"
        f"with Ranks(Group(), strict={strict}): print('tried')"
    )
    refusal = "RuntimeError: [Ranks] mlx 0.20.0 is installed, tested with >= 0.32.2, < 0.33; see strict=False"
    assert run(tmp_path, files, code) == (refusal if strict else "tried")


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [
        ("0.32.1", False),
        ("0.32.2", True),
        ("0.32.10", True),
        ("0.32.4.dev2026+abc", True),
        ("0.33", False),
        ("0.33.0rc1", False),
        ("1.0", False),
        ("unknown", False),
    ],
)
def test_require_compares_numbers_not_letters(found, is_tested):
    if is_tested:
        require("call", "mlx", found, "0.32.2", "0.33")
        return
    with pytest.raises(RuntimeError, match=r"^\[call\] mlx .* is installed, tested with >= 0.32.2, < 0.33"):
        require("call", "mlx", found, "0.32.2", "0.33")
    require("call", "mlx", found, "0.32.2", "0.33", strict=False)
