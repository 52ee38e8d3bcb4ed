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


def jax_of(version, tree_util):
    return {"jax/__init__.py": f"__version__ = '{version}'", "jax/numpy.py": "", "jax/tree_util.py": tree_util}


TABLE = "from kvpool.adapters.jax import PageTable\nPageTable(8, 4, 2, 2, 4, strict={strict}); print('tried')"
RANKS = (
    "from kvpool.adapters.ranks import Ranks\n"
    "class Group:\n    def rank(self): return 0\n    def size(self): return 1\n"
    "with Ranks(Group(), strict={strict}): print('tried')"
)
INSTALL = "from kvpool.adapters.transformers import install\nwith install(strict={strict}): print('tried')"
OTHERS = {  # files of another release, what uses it, what is said of it
    "transformers": (STOCK, INSTALL, "[install] transformers 5.24.0 is installed, tested with 5.23.0"),
    "jax": (
        jax_of("0.11.0", "def register_dataclass(cls): return cls"),
        *(TABLE, "[PageTable] jax 0.11.0 is installed, tested with >= 0.10, < 0.11"),
    ),
    "mlx": (
        {"mlx/__init__.py": "", "mlx/core.py": "__version__ = '0.20.0'"},
        *(RANKS, "[Ranks] mlx 0.20.0 is installed, tested with >= 0.32.2, < 0.33"),
    ),
}
OLD = {"torch.py": "class Tensor: pass", "transformers/__init__.py": "__version__ = '4.40.0'"}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_framework_of_another_release_is_refused_unless_strict_is_false(tmp_path, name, strict):
    files, code, said = OTHERS[name]
    assert run(tmp_path, files, code.format(strict=strict)) == (
        f"RuntimeError: {said}; see strict=False" if strict else "tried"
    )


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("transformers", OLD, "transformers 4.40.0 is installed, the adapter was tested with 5.23.0: No module"),
        ("jax", jax_of("0.4.20", ""), "jax 0.4.20 is installed, the adapter was tested with >= 0.10, < 0.11: cannot"),
    ],
)
def test_framework_that_is_too_old_to_be_imported_names_both_releases(tmp_path, name, files, said):
    error = run(tmp_path, files, f"import kvpool.adapters.{name}")
    assert error.startswith(f"ImportError: [kvpool.adapters] {said}")


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [
        *((found, True) for found in ("0.32.2", "0.32.10", "0.32.4.dev2026+abc")),
        *((found, False) for found in ("0.32.1", "0.33", "0.33.0rc1", "1.0", "unknown")),
    ],
)
def test_require_compares_numbers_not_letters(found, is_tested):
    if is_tested:
        require("call", "mlx", found, "0.32.2", "0.33")
        return
    with pytest.raises(RuntimeError, match=r"^\[call\] mlx .* is installed, tested with >= 0.32.2, < 0.33"):
        require("call", "mlx", found, "0.32.2", "0.33")
    require("call", "mlx", found, "0.32.2", "0.33", strict=False)
