"""Quantized storage on the cpu backend: decode beside dense storage, writes beside memcpy, errors.

    python -m benchmarks.quantized [--isa avx2] [--threads 1,2] [--layouts NHD,HND] [--json] [--gates]

All contestants of a table take turns in one process, and ratios are of the fastest times. ``--gates``: exit status 1
where a bound is missed; docs/quantized.md says where they are known to be.
"""

import argparse
import itertools
import json
import os
import sys
import time

import numpy as np

from benchmarks.attention import quantized
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool_backends.cpu import CPUBackend, default_isa, isas

HEADS, GROUP, DIM, BLOCK, ROWS = 8, 4, 128, 16, 16
FORMATS = {"bfloat16": "bfloat16", "float32": "float32", "int8": "8", "int4": "4", "keys int8, values int4": "8/4"}
DECODE_MAX, OF_FLOAT32_MIN, WRITE_MAX, ERROR_MAX = 1.1, 1.5, 1.4, 1e-3
SEED = 1


def race(contestants, repetitions):
    """Fastest time of each, in seconds; they take turns."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repetitions):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def spec_of(name, layout):
    return quantized.spec_of(FORMATS[name], num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, layout=layout)


def decode(isa, layout, threads, context, repetitions):
    """Decode of 16 rows in random blocks."""
    rng = np.random.default_rng(SEED)
    contestants = {
        name: quantized.Call(spec_of(name, layout), ROWS, context, HEADS * GROUP, threads, rng, isa).attend
        for name in FORMATS
    }
    times = race(contestants, repetitions)
    what = f"decode {ROWS} x {context}, {layout}, {threads} threads"
    for name, seconds in times.items():
        row = {"what": what, "format": name, "ms": seconds * 1e3, "of bfloat16": seconds / times["bfloat16"]}
        row["float32 takes"] = times["float32"] / seconds
        row["ok"] = name not in ("int8", "int4") or (
            row["of bfloat16"] <= DECODE_MAX and row["float32 takes"] >= OF_FLOAT32_MIN
        )
        yield row


def in_turn(count, run):
    """`run` of 0, 1 .. count - 1, and again, call by call."""
    turns = itertools.cycle(range(count))
    return lambda: run(next(turns))


def write(isa, layout, threads, repetitions, is_cold, num_tokens=512):
    """Writes of 512 tokens to random blocks of a large pool, beside memcpy of as many tokens in bfloat16.

    Cold: of ever other tokens to ever other blocks, so that neither is in a cache of the core's own; only these decide
    the gate. Several threads are compared to a write without conversion, which is memcpy on as many.
    """
    rng, shape, num_blocks = np.random.default_rng(SEED), (num_tokens, HEADS, DIM), 4096
    count, per_set = 16 if is_cold else 1, num_tokens // BLOCK
    floats = [[rng.standard_normal(shape, np.float32) for _ in "kv"] for _ in range(count)]
    given = {
        "float32": floats,
        "bfloat16": [[(x.view(np.uint32) >> 16).astype(np.uint16) for x in pair] for pair in floats],
    }
    blocks = rng.permutation(num_blocks)[: count * per_set].reshape(count, per_set, 1)
    slots = (blocks * BLOCK + np.arange(BLOCK)).reshape(count, -1)
    sources, targets = (np.ones((count, 2 * num_tokens * HEADS * DIM), np.uint16) for _ in range(2))
    contestants = {"memcpy": in_turn(count, lambda i: np.copyto(targets[i], sources[i]))}
    for name in ("bfloat16", "int8", "int4"):
        store = CPUBackend(spec_of(name, layout), num_blocks, isa=isa, num_threads=threads).store
        for dtype, tokens in given.items():
            contestants[f"{dtype} to {name}"] = in_turn(
                count, lambda i, store=store, tokens=tokens: store.write(0, *tokens[i], slots[i])
            )
    times = race(contestants, repetitions)
    baseline = "memcpy" if threads == 1 else "bfloat16 to bfloat16"
    what = f"write {num_tokens} {'cold' if is_cold else 'warm'} tokens, {layout}, {threads} threads"
    for name, seconds in times.items():
        ratio = seconds / times[baseline]
        yield {"what": what, "format": name, "ms": seconds * 1e3, f"of {baseline}": ratio,
               "ok": not (is_cold and name.startswith("bfloat16 to int")) or ratio <= WRITE_MAX}  # fmt: skip


def errors(isa):
    """Fused decode against dequantize-then-dense in float64, with and without sinks."""
    rng = np.random.default_rng(SEED)
    for name in ("int8", "int4"):
        worst = 0.0
        for context in (64, 300, 1024, 4096):
            backend = CPUBackend(spec_of(name, "NHD"), context // BLOCK + 1, isa=isa)
            k, v = (rng.standard_normal((context, HEADS, DIM)).astype(np.float32) for _ in "kv")
            backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(context))), 0, k, v)
            blocks = np.arange(-(-context // BLOCK))
            k, v = (x.astype(np.float64) for x in backend.gather(0, blocks, context))
            q = rng.standard_normal((1, HEADS * GROUP, DIM)).astype(np.float32)
            plan = StepArrays(blocks[None].astype(np.int32), np.array([context]), np.array([0, 1]))
            for sinks in (None, rng.standard_normal(HEADS * GROUP).astype(np.float32)):
                options = None if sinks is None else AttentionOptions(sinks=sinks)
                scores = np.einsum("hgd,chd->hgc", q[0].reshape(HEADS, GROUP, DIM).astype(np.float64), k) / DIM**0.5
                weights = np.exp(scores)
                extra = 0.0 if sinks is None else np.exp(sinks.astype(np.float64)).reshape(HEADS, GROUP, 1)
                weights /= weights.sum(-1, keepdims=True) + extra
                expected = np.einsum("hgc,chd->hgd", weights, v).reshape(1, HEADS * GROUP, DIM)
                out = backend.attend(backend.prepare(plan), 0, q, options=options)
                worst = max(worst, float(np.abs(out - expected).max()))
        what = "error of decode, contexts 64..4096"
        yield {"what": what, "format": name, "largest": worst, "ok": worst <= ERROR_MAX}


def main(argv=None):
    """Print the tables; 1 if gates are asked for and one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--isa", choices=isas(), default=default_isa(), help="of the kernels (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument("--layouts", default="NHD,HND")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=55)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gates", action="store_true", help="exit status 1 where a bound is missed")
    args = parser.parse_args(argv)
    rows = []
    for threads in map(int, args.threads.split(",")):
        for layout in args.layouts.split(","):
            rows += decode(args.isa, layout, threads, args.context, args.repetitions)
            for is_cold in (False, True):
                rows += write(args.isa, layout, threads, 5 * args.repetitions, is_cold)
    rows += errors(args.isa)
    if args.json:
        print(json.dumps({"isa": args.isa, "load": os.getloadavg()[0], "rows": rows}, indent=2))
    else:
        print(f"kernels for {args.isa}")
        what = None
        for row in rows:
            if row["what"] != what:
                what = row["what"]
                print(what)
            numbers = "  ".join(f"{key} {row[key]:.3g}" for key in row if key not in ("what", "format", "ok"))
            print(f"  {row['format']:<24} {numbers}{'' if row['ok'] else '  MISSED'}")
    return int(args.gates and not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
