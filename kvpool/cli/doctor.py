"""Show what is installed here: versions, the compiled core, backends, CPU kernels, Metal, memory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sysconfig
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import kvpool
from kvpool.cli.wired import most_wired_nbytes
from kvpool.config import read_text
from kvpool.errors import BackendUnavailable

PACKAGES = ("numpy", "mlx", "mlx-lm", "rich", "matplotlib")
ISAS = ("portable", "avx2", "avx512", "neon")  # that the CPU kernels are compiled for, where the compiler can


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the facts; 0 if the core and at least one backend work, else 1."""
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    usable = facts["core"]["compiled"] and any(reason is None for reason in facts["backends"].values())
    return 0 if usable else 1


def collect() -> dict[str, Any]:
    """Return all facts, ready for JSON. Missing things are None, sizes are bytes."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "kvpool": kvpool.__version__,
        "core": core_facts(),
        "packages": {name: next((one.version for one in distributions(name=name)), None) for name in PACKAGES},
        "backends": backend_reasons(),
        "cpu": cpu_facts(),
        "mlx_route": mlx_route(),
        "metal": metal_facts(),
        "mlx_native": mlx_native_facts(),
        "memory": memory_facts(),
    }


def core_facts() -> dict[str, Any]:
    """Return where the core was loaded from and whether it is compiled."""
    file = Path(str(import_module(kvpool.Pool.__module__).__file__))
    return {"file": str(file), "compiled": file.name.endswith(sysconfig.get_config_var("EXT_SUFFIX"))}


def backend_reasons() -> dict[str, str | None]:
    """Return for every known backend why it does not work here; None if it works."""
    import kvpool_backends

    reasons: dict[str, str | None] = {}
    for name in sorted(kvpool_backends.known()):
        try:
            kvpool_backends.load_backend(name)
            reasons[name] = None
        except BackendUnavailable as exc:
            reasons[name] = str(exc)
    return reasons


def cpu_facts() -> dict[str, Any]:
    """Return what the CPU kernels run with here and why: instruction set, threads; when memory has huge pages."""
    found = re.search(r"\[(\w+)\]", read_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    pages = {"huge_pages": found[1] if found else None}
    try:
        kernels = import_module("kvpool_backends.cpu._kernels")
    except ImportError as exc:
        return {"available": False, "reason": str(exc), **pages}
    usable = kernels.isas()
    usual = {"KVPOOL_CPU_ISA": "the best of this machine", "KVPOOL_NUM_THREADS": "the CPUs of this process"}
    isa_from, threads_from = (name if os.environ.get(name) else text for name, text in usual.items())
    return {
        "available": True,
        "isas": list(usable),
        "other_isas": [name for name in ISAS if name not in usable],
        "isa": kernels.default_isa(),
        "isa_from": isa_from,
        "tilings": kernels.tilings(),
        "num_threads": kernels.num_threads(),
        "num_threads_from": threads_from,
        **pages,
    }


def mlx_route() -> dict[str, str | None] | None:
    """Return the route of the mlx backend here, and why it is not the CPU kernels. None if it does not work."""
    try:
        from kvpool_backends.mlx.base import has_cuda, has_metal, kernels_refusal
    except ImportError:
        return None
    reason = kernels_refusal()
    gpu = "metal" if has_metal() else "cuda" if has_cuda() else "plain"
    return {"route": "kernels" if reason is None else gpu, "reason": reason}


def metal_facts() -> dict[str, Any]:
    """Return whether MLX can use Metal, on which device, whether the kernels run there, and if not, why."""
    try:
        import mlx.core as mx
    except ImportError as exc:
        return {"available": False, "reason": f"mlx does not import ({exc})", "kernels": None}
    if not mx.metal.is_available():
        where = "the CPU" if mx.default_device() == mx.cpu else "a GPU of another kind"
        return {
            "available": False,
            "reason": f"this build of MLX has no Metal device, it computes on {where}",
            "kernels": "no Metal device; they run in the tests only",
        }
    device = str(mx.device_info().get("device_name", "unknown"))
    facts = {"available": True, "device": device, "kernels": metal_kernels_failure()}
    return facts | {"wired_nbytes": most_wired_nbytes()}


def metal_kernels_failure() -> str | None:
    """Run the Metal kernels on a few blocks; return what went wrong, None if nothing did."""
    import mlx.core as mx

    from kvpool.config import KVSpec
    from kvpool.protocol import BatchShape
    from kvpool_backends.mlx.metal import MetalBackend

    try:
        with mx.stream(mx.gpu):
            backend = MetalBackend(KVSpec(1, 2, 64, "float16", 16), 2)
            backend.warmup([BatchShape(2, 2, 64, 8)])
    except Exception as exc:  # a compiler's message, mostly
        return f"{type(exc).__name__}: {exc}"
    return None


def mlx_native_facts() -> dict[str, Any] | None:
    """Return the state of the extension that writes in place. None if the mlx backend does not work."""
    try:
        from kvpool_backends.mlx.native import status
    except ImportError:
        return None
    return status()


def memory_facts() -> dict[str, Any]:
    """Return the RAM that is there and what this process could still take, in bytes; what the governor says of it."""
    from kvpool.cli.serve import KEPT_FREE
    from kvpool.config import available_memory_nbytes, memory_nbytes, memory_pressure
    from kvpool.governor import Governor, Holder, Machine

    total, available, pressure = memory_nbytes(), available_memory_nbytes(), memory_pressure()
    governor = Governor(0, total, total // KEPT_FREE)
    decision = governor.decide(Machine(0.0, available, pressure), [Holder("cache", 0, waiting=total)])
    facts = {"total_nbytes": total, "available_nbytes": available, "pressure": pressure}
    return facts | {"keep_free_nbytes": governor.reserve, "cache_nbytes": decision.size, "reason": decision.reason}


def describe(facts: dict[str, Any]) -> str:
    """Return the facts as aligned lines."""
    from kvpool.config import format_nbytes

    core, memory = facts["core"], facts["memory"]
    available, total, most, free = (
        format_nbytes(memory[f"{name}_nbytes"]) for name in ("available", "total", "cache", "keep_free")
    )
    pressure = {2: ", under memory pressure", 4: ", under critical memory pressure"}.get(memory["pressure"], "")
    rows = [
        ("Python", f"{facts['python']} ({facts['implementation']}), {facts['platform']}"),
        ("kvpool", facts["kvpool"]),
        ("core", f"{'compiled' if core['compiled'] else 'NOT compiled'}, {core['file']}"),
        *((name, number or "not installed") for name, number in facts["packages"].items()),
        *((f"backend {name}", reason or "works") for name, reason in facts["backends"].items()),
        *mlx_rows(facts["mlx_route"]),
        *cpu_rows(facts["cpu"]),
        *metal_rows(facts["metal"]),
        *native_rows(facts["mlx_native"], facts["mlx_route"]),
        ("memory", f"{available} available of {total}"),
        ("serve --memory", f"auto grows up to {most} less the weights now, keeps {free} free for others{pressure}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def cpu_rows(cpu: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the CPU kernels."""
    pages = {
        None: "unknown to this system",
        "always": "always",
        "madvise": "on request (madvise), kvpool requests them",
        "never": "never: reads of a large pool are slower",
    }
    rows = [("huge pages", pages.get(cpu["huge_pages"], cpu["huge_pages"]))]
    if not cpu["available"]:
        return [("CPU kernels", f"no: {cpu['reason']}"), *rows]
    others = f", not here: {', '.join(cpu['other_isas'])}" if cpu["other_isas"] else ""
    each = ", ".join(f"{name} {of['keys']} x {of['queries']} {of['layout']}" for name, of in cpu["tilings"].items())
    tiles = f"tiles of {cpu['tilings'][cpu['isa']]['tokens']} tokens"
    return [
        ("CPU kernels", f"{cpu['isa']}, {cpu['isa_from']} (it has {', '.join(cpu['isas'])}{others})"),
        ("CPU decode", f"keys x queries at once, layout unless a spec has one: {each}; {tiles}"),
        ("CPU threads", f"{cpu['num_threads']}, {cpu['num_threads_from']}"),
        *rows,
    ]


def mlx_rows(route: dict[str, str | None] | None) -> list[tuple[str, str]]:
    """Return the line of the mlx backend's route; no line if the backend does not work."""
    if route is None:
        return []
    how = {
        "kernels": "the CPU kernels on MLX's memory",
        "metal": "the Metal kernels on MLX's memory",
        "cuda": "the Metal kernels, compiled as CUDA, on MLX's memory",
        "plain": f"plain MLX: {route['reason']}",
    }
    return [("mlx computes by", how[str(route["route"])])]


def metal_rows(metal: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the GPU and its kernels; without MLX only that of the GPU."""
    from kvpool.config import format_nbytes

    if not metal["available"]:
        kernels = [("Metal kernels", f"no: {metal['kernels']}")] if metal["kernels"] else []
        return [("Metal", f"no: {metal['reason']}"), *kernels]
    failure = metal["kernels"]
    return [
        ("Metal", f"yes, {metal['device']}"),
        ("Metal kernels", "compiled and run" if failure is None else f"NO: {failure}"),
        ("wired memory", f"at most {format_nbytes(metal.get('wired_nbytes', 0))}, by serve, generate and demo"),
    ]


def native_rows(native: dict[str, Any] | None, route: dict[str, str | None] | None) -> list[tuple[str, str]]:
    """Return the line of the extension that writes in place; without it also what that costs, and what builds it."""
    if native is None:
        return []
    if route is not None and route["route"] in ("plain", "cuda"):
        return [("mlx extension", "not in use: plain MLX does not take it")]
    if native["active"]:
        return [("mlx extension", f"in use, {native['folder']}")]
    costs = "a step reaches the GPU when the one before has finished"
    if route is not None and route["route"] == "kernels":
        costs = "each layer is an evaluation of its own"
    return [("mlx extension", f"not in use: {native['why']}; so {costs}; `{native['command']}` builds it")]
