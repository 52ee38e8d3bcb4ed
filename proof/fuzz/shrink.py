"""From a program that fails to the shortest one that still does, and from that to a test in Python.

Delta debugging over the words of a program, then over the numbers in them, then over the pool: any part of a program
is a program, so nothing has to be repaired in between.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kvpool
from kvpool.testing.fuzz_target import FuzzFinding, Word, minimal, smaller_numbers
from proof.fuzz._fuzz import Driver
from proof.fuzz.hunt import make_driver
from proof.fuzz.shape import OPERATIONS, Shape, plan_options
from proof.fuzz.watched import FORMATS

MOST_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Failure:
    """A finding, as short as it got."""

    shape: Shape
    words: list[Word]
    what: str
    script: str  # a test in Python
    reproduces: bool  # the script fails on the same pool


def failure_of(shape: Shape, words: list[Word], make_pool: Callable[..., Any]) -> FuzzFinding | None:
    """What this program finds, or None."""
    driver = make_driver(shape, make_pool)
    try:
        driver.replay(words)
        driver.audit()
    except FuzzFinding as finding:
        return finding
    except kvpool.errors.CorruptState as error:
        return FuzzFinding(str(error))
    finally:
        driver.shutdown()
    return None


#: What makes a run plainer, each to be tried on what the ones before it left.
PLAINER: tuple[tuple[str, Any], ...] = (
    *(("plans", n) for n in (3, 2, 1)),
    *(("watermark", 0), ("in_order", False), ("_hash_bits", 64), ("max_blocks_per_seq", None), ("seed", 1)),
    *(("max_seqs", n) for n in (8, 4, 2)),
    *(("num_blocks", n) for n in (32, 16, 12, 8, 6, 5, 4)),
)


def plainer(shape: Shape, name: str, value: Any) -> Shape:
    """The same run with one plainer option; never a larger one."""
    before = shape.plans if name == "plans" else shape.pool[name]
    if name in ("plans", "max_seqs", "num_blocks"):
        value = min(value, before)
    if name == "num_blocks":
        most = min(shape.pool["max_blocks_per_seq"] or value, value - shape.pool["reserved_blocks"])
        pool = {**shape.pool, name: value, "max_blocks_per_seq": shape.pool["max_blocks_per_seq"] and most}
        return replace(shape, pool={**pool, "watermark": min(pool["watermark"], value - pool["reserved_blocks"])})
    return replace(shape, plans=value) if name == "plans" else replace(shape, pool={**shape.pool, name: value})


def fewer_groups(shape: Shape, words: list[Word], make_pool: Callable[..., Any]) -> Shape:
    """The same run without the layer groups that the failure does not need, the others in arena 0 where they can be.

    A group that sizes an arena cannot leave while others use the arena: the last group is tried first.
    """
    for at in reversed(range(len(shape.pool.get("groups", [])))):
        groups = shape.pool["groups"]
        for instead in ([], [replace(groups[at], arena=0, num_blocks=None)]):
            simpler = replace(shape, pool={**shape.pool, "groups": [*groups[:at], *instead, *groups[at + 1 :]]})
            try:
                fails = failure_of(simpler, words, make_pool) is not None
            except ValueError:  # no pool can be made of these
                continue
            if fails:
                shape = simpler
                break
    return shape


def shrink(shape: Shape, words: list[Word], make_pool: Callable[..., Any] = kvpool.Pool, source: str = "") -> Failure:
    """The shortest failure that is found from a failing program.

    Parameters
    ----------
    shape : Shape
    words : list of (op, a, b, c)
        A program that fails on this shape.
    make_pool : callable
        What the driver got.
    source : str
        How a script makes such a pool: an expression that is called with the pool's arguments, and the imports it
        needs in lines before it.
    """
    tries = itertools.count()

    def fails(tried: list[Word]) -> bool:
        return next(tries) < MOST_TRIES and failure_of(shape, tried, make_pool) is not None

    words = minimal(words, fails)
    for _ in range(2):  # a plainer pool may need fewer calls, and fewer calls a plainer pool
        shape = fewer_groups(shape, words, make_pool)  # while arena 0 is large enough for more groups
        for name, value in PLAINER:
            if name != "plans" and name not in shape.pool:
                continue
            simpler = plainer(shape, name, value)
            if simpler != shape and failure_of(simpler, words, make_pool) is not None:
                shape = simpler
        words = minimal(smaller_numbers(minimal(words, fails), fails), fails)
    finding = failure_of(shape, words, make_pool)
    what = str(finding) if finding else "the failure did not come again"
    script = make_script(shape, words, make_pool, source, what)
    return Failure(shape, words, what, script, script_fails(script))


def trace_of(shape: Shape, words: list[Word], make_pool: Callable[..., Any]) -> list[str]:
    """The calls of a program as lines of Python."""
    lines: list[str] = []
    driver = Driver(shape, make_pool, lines)
    try:
        driver.replay(words)
        driver.audit()
    except (FuzzFinding, kvpool.errors.CorruptState):
        pass
    finally:
        driver.shutdown()
    return lines


def make_script(
    shape: Shape, words: list[Word], make_pool: Callable[..., Any], source: str = "", what: str = ""
) -> str:
    """A test with the calls of a program, made one by one and watched."""
    if "groups" in shape.pool:
        return make_group_script(shape, words, source, what)
    lines = trace_of(shape, words, make_pool)
    used = "\n".join(lines)
    imports, _, expression = (source or "import kvpool\nkvpool.Pool").rpartition("\n")
    defaults = {"max_blocks_per_seq": None, "watermark": 0, "in_order": False, "prefix_cache": False}
    arguments = {k: v for k, v in shape.pool.items() if v != defaults.get(k, ...)}
    if not shape.pool["prefix_cache"]:
        arguments.pop("seed", None)
    if arguments.get("_hash_bits") == 64:
        arguments.pop("_hash_bits")
    body = [f"pool = Watched({expression}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}))"]
    for index in range(shape.plans):
        if re.search(rf"\bp{index}\b", used) or "misuse" in used:
            options = plan_options(shape, index)
            extra = "" if options["formats"] == FORMATS else f", formats={options['formats']!r}"
            extra += "" if options["dtype"] == "int32" else f", dtype={options['dtype']!r}"
            body.append(f"p{index} = pool.plan({shape.max_rows}, {shape.max_tokens}{extra})")
    body += [part for line in lines for part in line.split("\n")]
    if "raises" in used:
        imports = f"import pytest\n{imports}"
        names = sorted(set(re.findall(r"raises\((\w+)\)", used)) - {"ValueError", "TypeError", "IndexError"})
        if names:
            imports += f"\nfrom kvpool.errors import {', '.join(names)}"
    text = "\n".join(f"    {line}" for line in body)
    comment = "".join(f"    # {line}\n" for line in what.splitlines()[:3])
    head = f"{imports}\nfrom proof.fuzz.watched import Watched\n".lstrip()
    return f"{head}\n\ndef test_fuzz_{shape.seed}():\n{comment}{text}\n"


def make_group_script(shape: Shape, words: list[Word], source: str, what: str) -> str:
    """A test that plays a program on a pool with layer groups again, beside the books."""
    imports, _, expression = (source or "import kvpool\nkvpool.Pool").rpartition("\n")
    options = "".join(f"            {name!r}: {value!r},\n" for name, value in shape.pool.items())
    calls = "".join(f"        {tuple(word)},  # {OPERATIONS[word[0]]}\n" for word in words)
    comment = "".join(f"    # {line}\n" for line in what.splitlines()[:3])
    return (
        f"{imports}\nfrom kvpool.groups import Group\nfrom proof.fuzz.hunt import make_driver\n"
        f"from proof.fuzz.shape import Shape\n\n\ndef test_fuzz_{shape.seed}():\n{comment}"
        f"    shape = Shape(\n        seed={shape.seed},\n        pool={{\n{options}        }},\n"
        f"        dice={shape.dice[:1]!r},\n        plans={shape.plans},\n        max_rows={shape.max_rows},\n"
        f"        max_tokens={shape.max_tokens},\n        appetite={shape.appetite},\n    )\n"
        f"    words = [\n{calls}    ]\n    driver = make_driver(shape, {expression})\n"
        "    driver.replay(words)\n    driver.audit()\n"
    )


def script_fails(script: str) -> bool:
    """Whether a test that was made here fails."""
    space: dict[str, Any] = {}
    exec(compile(script, "<fuzz>", "exec"), space)
    (name,) = [name for name in space if name.startswith("test_")]
    try:
        space[name]()
    except BaseException as error:  # pytest's own "did not raise" is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | NameError | SyntaxError | AttributeError):
            raise
        return True
    return False
