"""A module that changes any one number of a pool, made from what the sources declare, for tests of `check`."""

from __future__ import annotations

from collections.abc import Iterator

from proof.mutation.source import Declarations
from proof.mutation.wrong import is_number

FIRST = 3  # elements of an array within a structure: there are at least so many
HEAD = '''"""Change one number of a pool, or hold its lock, for tests."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kvpool._core cimport Pool, lock_release, lock_try


def hold(Pool pool):
    if not lock_try(&pool.state.mutex):
        raise RuntimeError("the lock is taken")


def let_go(Pool pool):
    lock_release(&pool.state.mutex)


def state(Pool pool):
    return (pool.state.blocks.digest, pool.state.blocks.num_blank, pool.state.blocks.num_used,
            pool.state.blocks.num_dropped, pool.state.blocks.stamp, pool.state.seqs.stamp, pool.state.seqs.num_open,
            pool.state.index.ring.size)


def poke(Pool pool, int which, Py_ssize_t i, long long by):
'''


def numbers(known: Declarations) -> Iterator[tuple[str, str]]:
    """(place, type) of each number of a pool; an array's place has an ``i``."""
    for name, kind in known.fields["State"].items():
        if kind.rstrip("*") in known.fields:
            yield from _inside(known, f"pool.state.{name}", kind, True)


def _inside(known: Declarations, place: str, kind: str, outside: bool) -> Iterator[tuple[str, str]]:
    fields = known.fields[kind.rstrip("*")]
    for name, inner in ((name, inner.removeprefix("const ")) for name, inner in fields.items()):
        if is_number(inner):
            yield f"{place}.{name}", inner
        elif inner.endswith("*") and is_number(inner[:-1]) and "[i]" not in place:
            yield f"{place}.{name}[i]", inner[:-1]
        elif inner in known.fields and inner not in known.classes:
            yield from _inside(known, f"{place}.{name}", inner, outside)
        elif inner.partition("[")[0] in known.fields and "[" in inner:
            for k in range(FIRST):
                yield from _inside(known, f"{place}.{name}[{k}]", inner.partition("[")[0], False)
        elif inner[:-1] in known.fields and inner.endswith("*") and not inner.endswith("**") and "[i]" not in place:
            many = not any("*" in other for other in known.fields[inner[:-1]].values())
            if many or outside:
                yield from _inside(known, f"{place}.{name}[{'i' if many else 0}]", inner[:-1], False)


def poke_source(known: Declarations) -> str:
    """A module with `poke` and the names of what it changes."""
    found = list(numbers(known))
    lines = [
        f"    {'elif' if k else 'if'} which == {k}:\n        {place} += <{kind}>by"
        for k, (place, kind) in enumerate(found)
    ]
    return HEAD + "\n".join(lines) + f"\n\n\nNAMES = {tuple(place for place, _ in found)!r}\n"
