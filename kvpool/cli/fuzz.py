"""Run random programs on a block allocator, kvpool's or another one, and check every result.

``kvpool fuzz`` runs them on the installed core. ``--target module:factory`` drives another allocator
(``factory(num_blocks=..., block_size=...)``, see `kvpool.testing.fuzz_target.Allocator`) or a backend
(``factory(spec, num_blocks)``). The names of the parameters tell which; if they do not, the object that is made does.
A finding is shrunk and printed as a test, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pkgutil
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import kvpool
from kvpool.cli.console import CommandError, real, whole

SECONDS = 10.0
OWN = "kvpool.testing.fuzz_target:PoolAllocator"  # the installed core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seconds", help=f"how long to run (default: {SECONDS:g})")
    parser.add_argument("--ops", help="number of calls; with --seconds, whichever comes first ends the run")
    parser.add_argument("--seed", help="seed of the first run; with --ops 1 only that run (default: random)")
    parser.add_argument("--blocks", help="blocks of every pool (default: a few, chosen by the seed)")
    parser.add_argument("--block-size", help="tokens per block (default: a few, chosen by the seed)")
    parser.add_argument("--target", metavar="MODULE:FACTORY", help="run on this allocator or backend instead")


def run(args: argparse.Namespace) -> int:
    """Fuzz; 0 without a finding, 1 otherwise."""
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else whole("--seed", args.seed, 0, 2**63)
    sizes = {
        "num_blocks": None if args.blocks is None else whole("--blocks", args.blocks, 4),
        "block_size": None if args.block_size is None else whole("--block-size", args.block_size),
    }
    limit = limits(args)
    told = None if args.json else Progress(limit)
    facts = {"kvpool": kvpool.__version__, "seed": seed, **sizes}
    facts |= _fuzz(args.target or OWN, seed, sizes, {**limit, "told": told})
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    return 0 if facts["finding"] is None else 1


def limits(args: argparse.Namespace) -> dict[str, Any]:
    """The limit: seconds, calls, or both."""
    usual = SECONDS if args.ops is None else None
    seconds = usual if args.seconds is None else real("--seconds", args.seconds, 1e-9, 1e9)
    return {"seconds": seconds, "calls": None if args.ops is None else int(real("--ops", args.ops, 1))}


class Progress:
    """Shows on stderr how far it is, if that is a terminal."""

    def __init__(self, limit: dict[str, Any]) -> None:
        self.limit = limit
        self.began = self.last = time.monotonic()

    def __call__(self, report: Any) -> None:
        """Twice a second at most."""
        calls, now = report.calls, time.monotonic()
        if not sys.stderr.isatty() or now - self.last < 0.5:
            return
        self.last = now
        end = f"{self.limit['seconds']:g} s" if self.limit["seconds"] else f"{self.limit['calls']:,} calls"
        spent = now - self.began
        print(f"\r{spent:6.0f} s of {end}: {calls:,} calls, {calls / spent:,.0f}/s ", end="", file=sys.stderr)


def load_target(text: str) -> Callable[..., Any]:
    """The factory that ``module:factory`` names. It may be in the working directory."""
    if ":" not in text:
        raise CommandError(f"--target {text}: it has to be MODULE:FACTORY")
    sys.path.insert(0, here := os.getcwd())
    try:
        found: Callable[..., Any] = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"--target {text}: {error}") from None
    finally:
        sys.path.remove(here)  # which the module may have left
    return found


def _takes(factory: Callable[..., Any], *values: Any, **named: Any) -> bool | None:
    """Whether the factory takes these arguments, by its signature. None: the signature does not tell."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # compiled
        return None
    try:
        taken = signature.bind(*values, **named).arguments
    except TypeError:
        return False
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return None if any(signature.parameters[name].kind in anything for name in taken) else True


def _makes_allocators(target: str, factory: Callable[..., Any], sizes: dict[str, Any]) -> bool:
    """Whether the factory makes allocators, not backends: by its signature, or else by what it makes.

    A target that lacks something that the fuzzer needs raises CommandError; it is not a finding.
    """
    from kvpool.testing.filled import capabilities_of
    from kvpool.testing.fuzz_target import missing

    small = {"num_blocks": sizes["num_blocks"] or 8, "block_size": sizes["block_size"] or 2}
    as_allocator, as_backend = _takes(factory, **small), _takes(factory, None, 8)
    if as_backend and not _takes(factory, spec=None, num_blocks=8):
        as_backend = None  # two arguments of other names can be anything
    if as_allocator is False and as_backend is False:
        raise CommandError(f"--target {target}: it takes neither (num_blocks=, block_size=) nor (spec, num_blocks)")
    reasons = []
    if as_allocator is not False:
        try:
            lacks = missing(factory(**small))
        except Exception as error:
            if as_allocator or as_backend is False:
                return True  # that is a finding
            reasons.append(f"(num_blocks=, block_size=) raised {type(error).__name__}: {error}")
        else:
            if not lacks:
                return True
            reasons.append(f"what it makes is not an allocator, it lacks {', '.join(lacks)}")
    if as_backend and not as_allocator:
        return False
    if as_backend is None and not as_allocator:
        try:
            capabilities_of(factory)
            return False
        except Exception as error:
            reasons.append(f"(spec, num_blocks) made no backend: {type(error).__name__}: {error}")
            if as_allocator is False:
                reasons.append("the factory of an allocator has parameters named num_blocks and block_size")
    raise CommandError(f"--target {target}: {'; '.join(reasons)}")


def _fuzz(target: str, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    from kvpool.testing.fuzz_target import fuzz_backend, fuzz_target

    factory = load_target(target)
    if not callable(factory):
        raise CommandError(f"--target {target}: {factory!r} cannot be called")
    module, _, name = target.partition(":")
    how = {"source": f"from {module} import {name.partition('.')[0]}\n{name}", **sizes, **limit}
    report: Any
    if _makes_allocators(target, factory, sizes):
        report = fuzz_target(factory, seed, **how)
        more = {"kind": report.kind}
    else:
        try:
            report = fuzz_backend(factory, seed, **how)
        except ValueError as error:
            raise CommandError(f"--target {target}: {error}") from None
        more = {"cases": report.cases}
    named = "" if target == OWN else f" --target {target}"
    options = "".join(f" --{name.removeprefix('num_').replace('_', '-')} {n}" for name, n in sizes.items() if n)
    again = f"kvpool fuzz{named} --seed {report.seed} --ops 1{options}  # kvpool {kvpool.__version__}"
    names = ("runs", "calls", "seconds", "finding", "script", "script_fails")
    facts = {name: getattr(report, name) for name in names}
    return {"target": target, **more, **facts, "again": "" if report.finding is None else again}


def describe(facts: dict[str, Any]) -> str:
    """The report as text for people."""
    made = f"{facts['calls']:,} calls in {facts['seconds']:.1f} s, seed {facts['seed']}"
    if facts["finding"] is None:
        return f"{made}\nno finding"
    lines = [made, f"FINDING: {facts['finding']}", f"again: {facts['again']}"]
    if facts["script"] and not facts["script_fails"]:
        lines.append("the target fails only sometimes: the script below may pass")
    return "\n".join([*lines, "", facts["script"]]).rstrip()
