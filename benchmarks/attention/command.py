"""Attention on the CPU: time beside a read of the same K and V, and beside dense attention.

Only the call is timed, on a store and tables that are prepared. Contestants run in turns (`measure`), so that the
ratios hold on a machine that others share; K and V below 134 MB may live in a cache and decide no gate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.attention.settings import add_arguments, settings
from kvpool.cli.console import CommandError, progress

if TYPE_CHECKING:
    from benchmarks.attention.bench import Bench
    from benchmarks.attention.rows import Row

__all__ = ["add_arguments", "run"]


class Part(NamedTuple):
    """One part of the measurement: how often it tells of progress, and its rows."""

    count: Callable[[Bench], int]
    rows: Callable[[Bench], Iterator[Row]]


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was found; with ``--gates`` 1 if a gate is missed or not decided."""
    from benchmarks.attention import gates, report
    from benchmarks.attention.bench import Bench
    from benchmarks.attention.dense import torch_version

    kernels = load_kernels()
    wanted = settings(args, kernels.num_threads(), kernels.tilings()[kernels.default_isa()]["layout"])
    with_torch = wanted.against == "torch" and "decode" in wanted.parts
    bench = Bench(kernels, wanted, torch_version() if with_torch else None)
    start = time.perf_counter()
    rows = measure(bench, quiet=args.json)
    seconds = time.perf_counter() - start
    decided = gates.decide(rows, wanted, bench.isa)
    if args.json:
        print(json.dumps(report.as_json(bench, rows, decided, seconds), indent=2))
    else:
        report.show(bench, rows, decided, seconds)
    return 1 if args.gates and not all(gate.holds for gate in decided) else 0


def load_kernels() -> Any:
    """Return the kernels; ``KVPOOL_CPU_ISA`` names their instruction set."""
    try:
        return importlib.import_module("kvpool_backends.cpu._kernels")
    except ImportError as exc:
        raise CommandError(f"the CPU kernels do not import: {exc}") from None


def measure(bench: Bench, *, quiet: bool) -> list[Row]:
    """Return the rows of all parts that are wanted."""
    from benchmarks.attention import decode, moves, prefill, quantized, scores
    from benchmarks.attention.cache import WrongResult

    all_parts = {
        "decode": Part(decode.count, decode.rows),
        "prefill": Part(prefill.count, prefill.rows),
        "write": Part(moves.count, moves.write_rows),
        "copy": Part(moves.count, moves.copy_rows),
        "scores": Part(scores.count, scores.rows),
    }
    quantized_part = Part(quantized.count, quantized.rows)
    parts = [part for name, part in all_parts.items() if name in bench.settings.parts]
    parts += [quantized_part] if bench.settings.kv_bits else []
    with progress(sum(part.count(bench) for part in parts), quiet) as bench.say:
        try:
            return [row for part in parts for row in part.rows(bench)]
        except WrongResult as exc:
            raise CommandError(f"a result is wrong, its time means nothing: {exc}") from None
        except MemoryError:
            raise CommandError("not enough memory: choose a smaller --max-memory") from None
