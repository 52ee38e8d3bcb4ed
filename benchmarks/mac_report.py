"""``python -m benchmarks.mac_report``: one block of Markdown that says what a Mac is, what runs there, and how fast.

Each part runs whatever became of those before it; what fails stands in its place. Parts that measure have time limits,
and all of them together end within ten minutes.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks import predict
from kvpool.cli import doctor
from kvpool.cli.bench import metal
from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool.protocol import AttentionOptions, BatchShape, StepArrays

LAUNCHES = 300
SECONDS = {"variants": 150.0, "launches": 90.0, "writes": 30.0, "decode": 120.0, "prefill": 60.0, "model": 30.0}
VARIANTS = tuple(  # head dimension, query heads per KV head, dtype, bits
    (dim, group, dtype, bits)
    for dtype, bits in (("float16", None), ("bfloat16", None), ("bfloat16", 8), ("bfloat16", 4))
    for dim, group in ((64, 8), (128, 1), (128, 4), (128, 8), (128, 16), (256, 2), (256, 8))
)
SYSTEM = (  # what only the system tells, by command
    ("power", ("pmset", "-g", "batt")),
    ("low power mode", ("sh", "-c", "pmset -g | grep -i lowpowermode")),
    ("heat", ("pmset", "-g", "therm")),
)
DECODE = ("--batch", "1,8", "--context", "512,4k,32k", "--group", "4,8,16")
PREFILL = ((128, 4, "bfloat16"), (128, 8, "float16"), (64, 8, "bfloat16"), (256, 2, "bfloat16"))  # D, group, dtype
CHUNKS, PREFILL_CONTEXT = (8, 32, 512), 4096
END = """\
Paste all of this into an issue of kvpool, with what else the Mac was doing. A line with FAILED is a bug to report even
if nothing else seems wrong; `measured` far from `predicted` is worth a report too."""


def markdown() -> Iterator[str]:
    """The report, part by part."""
    facts = doctor.collect()
    metal_facts = facts["metal"]
    device = metal_facts.get("device", "no Metal device")
    yield f"# kvpool on {device}\n\n```\n{doctor.describe(facts)}\n```\n"
    yield part("Machine", lambda: machine(device))
    has_metal = bool(metal_facts["available"])
    for title, run in (
        ("Kernels compile", variants),
        (f"{LAUNCHES} launches against float64", launches),
        ("Writes: scatter, extension", writes),
        ("Decode, us of a layer", decode),
        ("Prefill, ms of a layer", prefill),
        ("Tokens per second of a small model", model),
    ):
        yield part(title, run if has_metal else lambda: ["not run: there is no Metal device here"])
    yield END


def part(title: str, lines: Callable[[], Iterable[str]]) -> str:
    """One part; what it raises is its last line."""
    found: list[str] = []
    begin = time.perf_counter()
    try:
        for line in lines():
            found.append(line)
    except Exception as error:  # the next part says something too
        found.append(f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
    text = "\n".join(found)
    return f"## {title}\n\n```\n{text}\n```\n\n{time.perf_counter() - begin:.0f} s\n"


def until(limit: str, runs: int = 1) -> Callable[[], bool]:
    """Whether the time of a part of `SECONDS` is over, or that of one of its `runs`."""
    end = time.perf_counter() + SECONDS[limit] / runs
    return lambda: time.perf_counter() > end


# ------------------------------------------------------------------------------------------- the machine


def machine(device: str) -> Iterator[str]:
    """System, GPU and its cores, power."""
    yield f"macOS {platform.mac_ver()[0] or 'no'}, {platform.platform()}"
    yield f"GPU cores: {gpu_cores() or 'unknown'}; known chip: {predict.gpu_of(device) or 'no'}"
    for name, command in SYSTEM:
        yield f"{name}: {' | '.join(said(command).split(chr(10)))[:300] or 'unknown'}"


def gpu_cores() -> int | None:
    """Cores of the GPU, as the registry of devices has them."""
    for line in said(("ioreg", "-l", "-r", "-c", "AGXAccelerator", "-d", "1")).splitlines():
        if "gpu-core-count" in line:
            return int(line.rpartition("=")[2])
    return None


def said(command: tuple[str, ...]) -> str:
    """The output of a command of the system, "" where there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ------------------------------------------------------------------------------------------- what runs


def variants() -> Iterator[str]:
    """Compile every kernel of common shapes: seconds, and threads of the kernel with the most registers, or why not."""
    from kvpool_backends.mlx.metal import MetalBackend

    over = until("variants")
    for dim, group, dtype, bits in VARIANTS:
        name = f"D {dim:3} group {group:2} {dtype:8} {f'{bits} bits' if bits else 'dense'}"
        if over():
            yield f"{name}: not tried, the time is over"
            continue
        begin = time.perf_counter()
        try:
            spec = KVSpec(1, 2, dim, dtype, 16, k_bits=bits, v_bits=bits)
            kernels: set[str] = set()
            MetalBackend(spec, 2, metal_kernel=naming(kernels)).warmup([BatchShape(1, 64, 64, 2 * group)])
            yield f"{name}: {time.perf_counter() - begin:5.1f} s, {len(kernels)} kernels, {threads(kernels)}"
        except Exception as error:  # a compiler's message
            yield f"{name}: FAILED: {type(error).__name__}: {str(error)[:400]}"


def naming(kernels: set[str]) -> Callable[..., Any]:
    """``metal_kernel`` that adds the names under which MLX compiles what it launches: MLX prints texts on demand."""
    import mlx.core as mx

    def make(**description: Any) -> Callable[..., Any]:
        factory: Any = mx.fast.metal_kernel
        kernel = factory(**description)

        def launch(**call: Any) -> Any:
            text, saved = io.StringIO(), os.dup(1)
            with tempfile.TemporaryFile() as printed, contextlib.redirect_stdout(text):
                os.dup2(printed.fileno(), 1)  # C++ prints past Python
                try:
                    results = kernel(**call, verbose=True)
                finally:
                    os.dup2(saved, 1)
                    os.close(saved)
                printed.seek(0)
                text.write(printed.read().decode(errors="replace"))
            kernels.update(re.findall(r'host_name\("(\w+)"\)', text.getvalue()))
            return results

        return launch

    return make


def threads(kernels: set[str]) -> str:
    """The least of the largest threadgroups that kernels can run with: 1024 where registers do not limit them."""
    from kvpool_backends.mlx.native import load

    module = load()
    if module is None:
        return "threads unknown without the extension"
    found = [(module.max_threads(name), name.removeprefix("custom_kernel_kvpool_")) for name in sorted(kernels)]
    return f"at least {min(found)[0]} threads ({min(found)[1][:24]})" if found else "no names"


def launches() -> Iterator[str]:
    """Random batches, each compared with float64 arithmetic on the CPU."""
    from kvpool.testing.filled import fill
    from kvpool_backends.mlx.metal import MetalBackend

    rng, over, count, wrong = np.random.default_rng(7), until("launches"), 0, 0
    while count < LAUNCHES and not over():
        dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
        group, dim = int(rng.choice([1, 4, 8, 12])), int(rng.choice([64, 128, 256]))
        spec = KVSpec(1, 2, dim, dtype, int(rng.choice([8, 16, 32])))
        contexts = [int(n) for n in rng.integers(1, 1500, 3)]
        filled = fill(MetalBackend, spec, contexts)
        sinks = AttentionOptions(sinks=rng.standard_normal(2 * group))
        for options in (None, AttentionOptions(window=int(rng.integers(1, 600))), sinks):
            for q_lens in ((1, 1, 1), tuple(min(n, int(rng.integers(1, 70))) for n in contexts)):
                count += 1
                try:
                    filled.check(q_lens, 2 * group, "report", options=options)
                except AssertionError as error:
                    wrong += 1
                    what = options.features if options else ()
                    yield f"FAILED: {spec.describe(1)}, group {group}, {contexts}, {q_lens}, {what}: {str(error)[:200]}"
    yield f"{count} launches, {wrong} wrong (seed 7)"


# ------------------------------------------------------------------------------------------- how fast


def writes() -> Iterator[str]:
    """Steps of 16 rows through 8 layers, written by MLX's scatter and by the extension, with a read of each layer."""
    import mlx.core as mx

    from kvpool_backends.mlx import MLXBackend

    spec = KVSpec(8, 8, 128, "float16", 16)
    x = mx.random.normal((16, 8, 128)).astype(mx.float16)
    plan = StepArrays(
        np.arange(512).reshape(16, 32), np.full(16, 500), np.arange(17), 16 * (np.arange(16) * 32 + 31) + 3
    )
    for native in (False, True):
        try:
            backend: Any = MLXBackend(spec, 512, native=native)
        except BackendUnavailable as error:
            yield f"{'extension' if native else 'scatter'}: {error}"
            continue
        times: list[float] = []
        over = until("writes", 2)
        while not times or (len(times) < 40 and not over()):
            begin = time.perf_counter()
            step = backend.prepare(plan)
            outs = []
            for layer in range(spec.num_layers):
                backend.write(step, layer, x, x)
                outs.append(backend.attend(step, layer, x))
            mx.eval(outs)
            times.append(time.perf_counter() - begin)
        yield f"{'extension' if native else 'scatter'}: {np.median(times) * 1e3:.2f} ms a step, {len(times)} steps"


def decode() -> Iterator[str]:
    """The cases of ``kvpool bench metal``, the most telling ones first, with what is predicted for this chip."""
    gpu, over = predict.gpu_of(metal.metal_device(), gpu_cores()), until("decode")
    yield f"{'':44}{'measured':>9}{'predicted':>10}{'dense':>8}{'predicted':>10}"
    for dim, dtypes in ((128, "bfloat16,float16"), (64, "bfloat16"), (256, "bfloat16")):
        parser = ArgumentParser()
        metal.add_arguments(parser)
        chosen = parser.parse_args(["--head-dim", str(dim), "--dtype", dtypes, *DECODE])
        for case in metal.cases(chosen, 16):
            if over():
                yield f"D {dim} {case.name}: not measured, the time is over"
                continue
            for row in metal.case_rows(case, (16,), 3):
                shape = predict.Shape(case.batch, case.context, case.num_kv_heads, case.group, dim)
                guessed = [predict.paged_seconds(gpu, shape), predict.dense_seconds(gpu, shape)] if gpu else [0.0, 0.0]
                ours, theirs, wanted, expected = (1e6 * t for t in (row["paged"], row["dense"], *guessed))
                yield f"D {dim:3} {case.name:38}{ours:9.0f}{wanted:10.0f}{theirs:8.0f}{expected:10.0f}"


def prefill() -> Iterator[str]:
    """Chunks at the end of a context, with and without a window, beside MLX's own attention on dense K and V."""
    import mlx.core as mx

    from kvpool_backends.mlx.metal import MetalBackend

    over, context = until("prefill"), PREFILL_CONTEXT
    yield f"{'':34}{'kvpool':>9}{'dense':>9}"
    for dim, group, dtype in PREFILL:
        spec = KVSpec(1, 8, dim, dtype, 16)
        backend = MetalBackend(spec, context // 16)
        k = mx.random.normal((1, 8, context, dim)).astype(backend.dtype)
        for chunk, window in product(CHUNKS, (None, context // 4)):
            name = f"D {dim:3} group {group} {dtype:8} {chunk:4} queries{f', window {window}' if window else ''}"
            if over():
                yield f"{name}: not measured, the time is over"
                continue
            q = mx.random.normal((chunk, 8 * group, dim)).astype(backend.dtype)
            options = None if window is None else AttentionOptions(window=window)
            tables = np.arange(context // 16)[None]
            step = backend.prepare(StepArrays(tables, np.array([context]), np.array([0, chunk])))
            seen = np.arange(context) - np.arange(context - chunk, context)[:, None]
            mask: Any = "causal" if window is None else mx.array((seen <= 0) & (seen > -window))

            def ours(step: Any = step, q: Any = q, options: Any = options, backend: Any = backend) -> Any:
                return backend.attend(step, 0, q, options=options)

            def dense(q: Any = q, k: Any = k, mask: Any = mask) -> Any:
                queries = q.swapaxes(0, 1)[None]
                return mx.fast.scaled_dot_product_attention(queries, k, k, scale=q.shape[-1] ** -0.5, mask=mask)

            times = [median(partial(evaluate, run)) * 1e3 / 8 for run in (ours, dense)]
            yield f"{name:34}{times[0]:9.2f}{times[1]:9.2f}"


def evaluate(run: Callable[[], Any]) -> None:
    """Eight layers, built lazily and evaluated at once."""
    import mlx.core as mx

    mx.eval([run() for _ in range(8)])


def median(run: Callable[[], object]) -> float:
    """Seconds of one of five runs, after one that is not counted."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def model() -> Iterator[str]:
    """A small random model, by mlx-lm's own caches and on the pool."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from kvpool.adapters.mlx_lm import install
    from kvpool.adapters.mlx_lm.tiny import make

    lm, _ = make()
    prompt = mx.array(np.random.default_rng(1).integers(1, 250, 300))

    def rate() -> float:
        over, count, begin = until("model", 4), 0, 0.0
        for _ in generate_step(prompt, lm, max_tokens=200):
            begin, count = begin or time.perf_counter(), count + 1
            if over():
                break
        return (count - 1) / (time.perf_counter() - begin)

    rate()
    yield f"mlx-lm: {rate():.0f}"
    with install(lm, 64, block_size=16) as kv:
        rate()
        yield f"on the pool, {kv.route}, {kv.backend!r}: {rate():.0f}"


if __name__ == "__main__":
    for text in markdown():
        print(text, flush=True)
