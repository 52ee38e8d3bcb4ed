"""``python -m benchmarks.mac_report``: one block of Markdown that says what a Mac is, what runs there, and how fast.

Each part runs whether those before it failed or not; an error is printed in place of its part. Parts that measure have
time limits, and all of them together end within ten minutes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import platform
import re
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks import metal, predict
from kvpool.cli import doctor
from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool.protocol import AttentionOptions, BatchShape, StepArrays

LAUNCHES = 300
SECONDS = {"variants": 130.0, "launches": 70.0, "writes": 40.0, "decode": 90.0, "prefill": 50.0, "model": 60.0}
SECONDS |= {"sweep": 40.0}
POOLS = (512, 4096)  # blocks: as large as the contexts, and larger than what MLX lets a command buffer bind
LLAMA = {  # with random weights of 4 bits: 0.7 GB
    **{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "vocab_size": 32000},
}
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
DECODE: dict[str, Any] = {"batches": (1, 8), "contexts": (512, 4096, 32768), "groups": (4, 8, 16)}
PREFILL = ((128, 4, "bfloat16"), (128, 8, "float16"), (64, 8, "bfloat16"), (256, 2, "bfloat16"))  # D, group, dtype
CHUNKS, PREFILL_CONTEXT, LAYERS = (8, 32, 512), 4096, 8
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
    has_metal, made = bool(metal_facts["available"]), list[str]()
    for title, run in (
        ("Bits", bits),
        ("Kernels compile", variants),
        (f"{LAUNCHES} launches against float64", launches),
        ("Writes: scatter, extension", writes),
        ("Decode, us of a layer", decode),
        ("Prefill, ms of a layer", prefill),
        ("Tokens per second of a model of 4 bits", model),
        ("Constants that are fastest", sweep),
    ):
        made.append(part(title, run if has_metal else lambda: ["not run: there is no Metal device here"]))
        yield made[-1]
    yield END
    told = json.dumps({"facts": facts, "parts": made}, default=str).encode()
    yield f"\n```\n{base64.b64encode(zlib.compress(told, 9)).decode()}\n```\n"


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
    from kvpool_backends.mlx.metal import has_tensor_operations

    chip, tensors = predict.gpu_of(device) or "no", "yes" if has_tensor_operations() else "no"
    yield f"GPU cores: {gpu_cores() or 'unknown'}; known chip: {chip}; tensor operations for MLX: {tensors}"
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


def bits() -> Iterator[str]:
    """Show how exp2 and a division round, and which elements of a matrix the lanes hold."""
    import mlx.core as mx

    factory: Any = mx.fast.metal_kernel
    probe = factory(
        name="kvpool_probe",
        input_names=["x"],
        output_names=["exp2s", "divided", "pairs"],
        header="#include <metal_simdgroup_matrix>\n",
        source="""
            const uint lane = thread_index_in_simdgroup;
            exp2s[lane] = metal::fast::exp2(x[lane]);
            divided[lane] = x[lane] / x[31 - lane];
            simdgroup_float8x8 ramp;
            simdgroup_load(ramp, x + 32, 8);
            pairs[2 * lane] = ramp.thread_elements()[0];
            pairs[2 * lane + 1] = ramp.thread_elements()[1];
        """,
    )
    x = np.concatenate([np.random.default_rng(0).uniform(-20, 0, 32), np.arange(64)]).astype(np.float32)
    outs = probe(
        inputs=[mx.array(x)],
        output_shapes=[(32,), (32,), (64,)],
        output_dtypes=[mx.float32] * 3,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    exp2s, divided, pairs = (np.array(out) for out in outs)
    exact = np.exp2(x[:32].astype(np.float64)).astype(np.float32)
    yield f"exp2: off by {np.abs(exp2s.view(np.int32) - exact.view(np.int32)).max()} units in the last place"
    yield f"division: {int((divided != x[:32] / x[31::-1]).sum())} of 32 not rounded to nearest"
    lane = np.arange(32)
    row, column = (lane >> 2 & 4) | (lane >> 1 & 3), (lane >> 1 & 4) | (lane << 1 & 2)
    expected = np.stack([8 * row + column, 8 * row + column + 1], axis=1).ravel()
    found = "as expected" if (pairs == expected).all() else f"FAILED: {pairs.astype(int).tolist()}"
    yield f"lanes of a matrix: {found}"


def variants() -> Iterator[str]:
    """Compile every kernel of common shapes: seconds and what pipelines allow, or why not."""
    from kvpool_backends.mlx.metal import MetalBackend

    over, most = until("variants"), 4000
    yield "limits of a pipeline: threads of a threadgroup / lanes of a simdgroup / bytes of threadgroup memory"
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
            yield f"{name}: {time.perf_counter() - begin:5.1f} s, {len(kernels)} kernels, {limits(kernels)}"
        except Exception as error:  # a compiler's message: the first one whole
            yield f"{name}: FAILED: {type(error).__name__}: {str(error)[:most]}"
            most = 100


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


def limits(kernels: set[str]) -> str:
    """What the pipelines of kernels allow: 1024 threads where registers do not limit them."""
    from kvpool_backends.mlx.native import load

    module = load()
    if module is None:
        return "limits unknown without the extension"
    found = sorted((*module.metal_limits(name), name.removeprefix("custom_kernel_kvpool_")) for name in kernels)
    return ", ".join(f"{name[:16]} {'/'.join(map(str, allowed))}" for *allowed, name in found) or "no names"


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
    """Steps of 16 rows through 8 layers, written by MLX's scatter and by the extension, with a read of each layer.

    The pool is as large as the contexts, and larger. What the calls of a layer take is time of the host.
    """
    import mlx.core as mx

    from kvpool_backends.mlx import MLXBackend

    spec = KVSpec(8, 8, 128, "float16", 16)
    x = mx.random.normal((16, 8, 128)).astype(mx.float16)
    plan = StepArrays(
        np.arange(512).reshape(16, 32), np.full(16, 500), np.arange(17), 16 * (np.arange(16) * 32 + 31) + 3
    )
    for native, num_blocks in product((False, True), POOLS):
        name = f"{'extension' if native else 'scatter'}, {num_blocks} blocks"
        try:
            backend: Any = MLXBackend(spec, num_blocks, native=native)
        except BackendUnavailable as error:
            yield f"{name}: {error}"
            continue
        times, built = list[float](), list[float]()
        over = until("writes", 4)
        while not times or (len(times) < 40 and not over()):
            begin = time.perf_counter()
            step = backend.prepare(plan)
            outs = []
            for layer in range(spec.num_layers):
                backend.write(step, layer, x, x)
                outs.append(backend.attend(step, layer, x))
            built.append(time.perf_counter() - begin)
            mx.eval(outs)
            times.append(time.perf_counter() - begin)
        took, host = np.median(times) * 1e3, np.median(built) * 1e6 / spec.num_layers
        yield f"{name}: {took:.2f} ms a step, of which a layer's calls {host:.0f} us, {len(times)} steps"


def decode() -> Iterator[str]:
    """Both kinds of attention, the most telling cases first, with what is predicted for this chip."""
    gpu, over = predict.gpu_of(metal.metal_device(), gpu_cores()), until("decode")
    yield f"{'':44}{'measured':>9}{'predicted':>10}{'dense':>8}{'predicted':>10}"
    for dim, dtypes in ((128, ("bfloat16", "float16")), (64, ("bfloat16",)), (256, ("bfloat16",))):
        for case in metal.cases(dtypes, **DECODE, head_dim=dim):
            if over():
                yield f"D {dim} {case.name}: not measured, the time is over"
                continue
            shape = predict.Shape(case.batch, case.context, case.num_kv_heads, case.group, dim)
            guessed = predict.both_seconds(gpu, shape) if gpu else [0.0, 0.0]
            ours, theirs, wanted, expected = (1e6 * t for t in (*metal.seconds(case), *guessed))
            yield f"D {dim:3} {case.name:38}{ours:9.0f}{wanted:10.0f}{theirs:8.0f}{expected:10.0f}"


def prefill() -> Iterator[str]:
    """Chunks at the end of a context, with and without a window, beside MLX's own attention, and what is predicted."""
    from benchmarks import beside_dense
    from kvpool_backends.mlx.metal import MetalBackend, has_tensor_operations

    gpu, over, context = predict.gpu_of(metal.metal_device(), gpu_cores()), until("prefill"), PREFILL_CONTEXT
    gpu = gpu and gpu._replace(nax=has_tensor_operations())
    yield f"{'':44}{'kvpool':>9}{'predicted':>10}{'dense':>9}{'predicted':>10}"
    for dim, group, dtype in PREFILL:
        backend = MetalBackend(KVSpec(LAYERS, 8, dim, dtype, 16), context // 16)
        for chunk, window in product(CHUNKS, (None, context // 4)):
            name = f"D {dim:3} group {group} {dtype:8} {chunk:4} queries{f', window {window}' if window else ''}"
            if over():
                yield f"{name}: not measured, the time is over"
                continue
            shape = predict.Shape(1, context, 8, group, dim)
            guessed = predict.both_seconds(gpu, shape, chunk, window) if gpu else [0.0, 0.0]
            found = (t / LAYERS for t in beside_dense.seconds(backend, 1, context, chunk, group, window))
            ours, dense, wanted, expected = (1e3 * t for t in (*found, *guessed))
            yield f"{name:44}{ours:9.2f}{wanted:10.2f}{dense:9.2f}{expected:10.2f}"


def model() -> Iterator[str]:
    """Tokens a second of a random model by mlx-lm's loop, by that on the pool, by `Engine`; CPU time of a token."""
    import mlx.core as mx
    from mlx.nn import quantize
    from mlx_lm.generate import stream_generate
    from mlx_lm.models import llama

    from kvpool.adapters.mlx_lm import Engine, install
    from kvpool.adapters.mlx_lm.tiny import make

    lm, (_, tokenizer) = llama.Model(llama.ModelArgs.from_dict(LLAMA)), make()
    quantize(lm, 64, 4)
    mx.eval(lm.parameters())
    prompt = np.random.default_rng(1).integers(1, 250, 300).tolist()

    def rate(tokens: Iterable[Any]) -> str:
        over, count, begin, used = until("model", 3), 0, 0.0, 0.0
        for _ in tokens:
            if not begin:
                begin, used = time.perf_counter(), time.process_time()
            count += 1
            if over():
                break
        took, cpu = time.perf_counter() - begin, time.process_time() - used
        return f"{(count - 1) / took:.0f}, {1e3 * cpu / max(1, count - 1):.2f} ms, {mx.get_active_memory() >> 20} MiB"

    def steps(engine: Engine) -> Iterator[Any]:
        engine.submit(prompt, max_tokens=200)
        while engine.num_unfinished:
            yield engine.step()

    yield f"mlx-lm: {rate(stream_generate(lm, tokenizer, prompt, 200))}"
    with install(lm, 64, block_size=16) as kv:
        yield f"on the pool, {kv.route}, {kv.backend!r}: {rate(stream_generate(lm, tokenizer, prompt, 200))}"
    with Engine(lm, 64, tokenizer=tokenizer) as engine:
        yield f"Engine: {rate(steps(engine))}"


def sweep() -> Iterator[str]:
    """The constants with which one short and one long decode take least."""
    over = until("sweep")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        best = {} if over() else metal.sweep(list(metal.cases(("bfloat16",), (4,), (1,), (1024, 16384))))
    yield from said.getvalue().splitlines()
    yield json.dumps(best) if best else "not tried, the time is over"


if __name__ == "__main__":
    argparse.ArgumentParser(description="Print the report of this machine; it takes no options.").parse_args()
    for text in markdown():
        print(text, flush=True)
