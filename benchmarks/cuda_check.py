"""``python -m benchmarks.cuda_check``: whether the mlx backend's kernels are right on a GPU with CUDA, and how fast.

It takes 25 minutes at most and prints one block of Markdown. What has ended is kept in ``build/cuda-check.json``: a
second run goes on from there, and one with other kernels starts again. Nothing of this runs without such a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks import beside_dense
from kvpool.protocol import StepArrays
from kvpool.spec import KVSpec

ROOT = Path(__file__).parents[1]
STATE = ROOT / "build" / "cuda-check.json"
ATTENTION = ("test_metal_attention.py", "test_metal_packed_attention.py", "test_metal_scores.py")
FAULTS = "window or last-part or raw"  # the planted faults that no counter finds
TESTS_SECONDS = 480
LAYERS, DIM, KV_HEADS, HEADS = 8, 128, 8, 32  # of what is timed
DECODE = ((32, 4096), (8, 4096), (1, 1024), (1, 16384))  # rows and tokens of each
PREFILL = ((512, 4096), (2048, 16384))  # queries, tokens


# ---------------------------------------------------------------------------------------------- is it right


def conformance() -> Iterator[str]:
    """Run the cases that every backend passes."""
    from kvpool.testing import conformance as kit
    from kvpool_backends.mlx import MLXBackend

    left_out, wrong = 0, 0
    for case in kit.CASES:
        try:
            case(MLXBackend)
        except kit.NotApplicable:
            left_out += 1
        except Exception as error:
            wrong += 1
            yield f"FAILED: {case.__name__}: {type(error).__name__}: {str(error)[:300]}"
    yield f"{len(kit.CASES) - left_out} cases, {wrong} failed, {left_out} do not apply"


def tested(files: tuple[str, ...], *options: str) -> Iterator[str]:
    """Run tests of the kernels, which take this GPU for what they run on."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", "600"]
    command += [*options, *(str(ROOT / "tests" / "metal" / name) for name in files)]
    environment = os.environ | {"KVPOOL_METAL_ENGINE": "cuda", "KVPOOL_METAL_LAUNCHES": "2000", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_SECONDS)
    except subprocess.TimeoutExpired as error:
        yield f"not ended in {TESTS_SECONDS} s: {(error.stdout or b'').decode()[-200:]}"
        return
    yield from (line[:300] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    yield done.stdout.strip().rpartition("\n")[2] or done.stderr[-300:]


def tokens() -> Iterator[str]:
    """Compare the tokens of small models of ten families with those of mlx-lm's own caches."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    from mlx_families import FAMILIES  # type: ignore[import-not-found]
    from mlx_models import batch_tokens, random_prompts, solo_tokens  # type: ignore[import-not-found]

    from kvpool.adapters.mlx_lm import install

    prompts = random_prompts((3, 40, 9))
    for name, make in FAMILIES.items():
        model = make()
        stock = [solo_tokens(model, prompt, 16) for prompt in prompts]
        with install(model, 60, block_size=8) as kv:
            same = batch_tokens(model, prompts, 16) == stock
            yield f"{'' if same else 'FAILED: other tokens: '}{name}, {kv.route}, {kv.backend!r}"


def large_pool() -> Iterator[str]:
    """Attend to the last blocks of planes of 5 GiB: their offsets have more than 32 bits."""
    from kvpool_backends.mlx import MLXBackend
    from kvpool_backends.numpy import NumpyBackend

    small = KVSpec(1, 8, 128, "float32", 16)
    block_nbytes = small.block_nbytes // 2  # of one plane
    num_blocks, length = 5 * 2**30 // block_nbytes, 500
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((length, 8, 128)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((1, 32, 128)).astype(np.float32)
    outs = []
    for backend, last in ((MLXBackend(small, num_blocks), num_blocks), (NumpyBackend(small, 32), 32)):
        table = np.arange(last - 32, last)
        slots = (table[:, None] * 16 + np.arange(16)).ravel()[:length]
        step = backend.prepare(StepArrays(table[None], np.array([length]), np.array([0, 1]), slots))
        backend.write(step, 0, backend.asarray(k), backend.asarray(v))
        outs.append(backend.to_numpy(backend.attend(step, 0, backend.asarray(q))))
    error = float(np.abs(outs[0] - outs[1]).max())
    yield f"{'' if error < 1e-4 else 'FAILED: '}{num_blocks} blocks, error {error:.2g}"


# ---------------------------------------------------------------------------------------------- how fast


def speed() -> Iterator[str]:
    """Time decode and chunks through 8 layers in bfloat16, beside MLX's own attention on dense K and V."""
    yield f"{'':34}{'kvpool':>9}{'dense':>9}{'ratio':>7}   ms for {LAYERS} layers"
    for rows, context in DECODE:
        yield timed(f"decode, {rows} x {context}", rows, context, 1)
    for queries, context in PREFILL:
        yield timed(f"chunk of {queries} at the end of {context}", 1, context, queries)


def timed(name: str, rows: int, context: int, queries: int) -> str:
    """One line of `speed`."""
    from kvpool_backends.mlx import MLXBackend

    backend = MLXBackend(KVSpec(LAYERS, KV_HEADS, DIM, "bfloat16", 16), rows * context // 16)
    mine, other = beside_dense.seconds(backend, rows, context, queries, HEADS // KV_HEADS)
    return f"{name:34}{1e3 * mine:9.2f}{1e3 * other:9.2f}{mine / other:7.2f}"


# ---------------------------------------------------------------------------------------------- command

PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "Speed": speed,
    "Pools of more than 4 GiB": large_pool,
    "Tokens of mlx-lm": tokens,
    "Conformance kit": conformance,
    "Planted faults": partial(tested, ("test_metal_mutations.py",), "-k", FAULTS),
    "2,000 launches against float64": partial(tested, ATTENTION, "-k", "float64 or packed_keys"),
}


def main() -> int:
    """Run what has not ended yet, and print everything. 1 if anything is wrong."""
    if not mx.cuda.is_available():
        print("MLX does not compute with CUDA here: `pip install mlx[cuda13]` beside a GPU", file=sys.stderr)
        return 2
    files = sorted((ROOT / "metal").glob("*.*"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in files) + mx.__version__.encode()).hexdigest()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    done = state.get(key, {})
    for title, run in PARTS.items():
        if title not in done:
            print(f"==> {title}", file=sys.stderr)
            begin = time.perf_counter()
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    lines = list(run())
            except Exception as error:
                lines = [f"FAILED: {type(error).__name__}: {str(error)[:1000]}"]
            done[title] = [*lines, f"({time.perf_counter() - begin:.0f} s)"]
            STATE.parent.mkdir(exist_ok=True)
            STATE.write_text(json.dumps({key: done}, indent=1))
    print(report(done))
    return int("FAILED" in report(done))


def report(done: dict[str, list[str]]) -> str:
    """The block to paste."""
    name = mx.device_info().get("device_name", "a GPU")
    parts = [f"## {title}\n\n```\n" + "\n".join(done[title]) + "\n```" for title in PARTS]
    return "\n\n".join([f"# kvpool on {name}, MLX {mx.__version__}", *parts])


if __name__ == "__main__":
    sys.exit(main())
