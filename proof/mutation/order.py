"""Whether two neighbouring statements may be exchanged for all that is written in them.

What a statement reads and writes are fields, by their names, and local variables; a call reads and writes what the
functions of the core read and write that it leads to. Two statements depend on each other if one writes what the other
reads or writes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from proof.mutation.source import Function, covered
from proof.mutation.wrong import name_of

#: Of libraries: they only read what they are given.
PURE = {"min", "max", "len", "isinstance", "hasattr", "range", "sizeof", "abs", "type", "memcmp", "getattr"}


def base(node: ast.expr) -> str:
    """The field or the variable that a place is part of: ``q.life[k]`` is of ``.life``."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Effects:
    """What statements read and write."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.calls: set[str] = set()

    def add(self, plain: str) -> None:
        """One more statement, in covered text."""
        if not plain.strip():
            return
        tree = ast.parse(plain.strip()).body[0]
        stores = tree.targets if isinstance(tree, ast.Assign) else [getattr(tree, "target", None)]
        stores = [part for node in stores if node for part in (node.elts if isinstance(node, ast.Tuple) else [node])]
        self.writes |= {base(node) for node in stores}
        places = set(map(id, stores)) if not isinstance(tree, ast.AugAssign) else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in places:
                self.reads.add(base(node))
            if isinstance(node, ast.Call) and name_of(node) not in PURE:
                self.calls.add(name_of(node))
                given = [arg.operand if isinstance(arg, ast.UnaryOp) else arg for arg in node.args]
                # An address, or an array, may be written to; of a whole structure its fields tell more.
                self.writes |= {base(arg) for arg in given[:1] if isinstance(arg, ast.Attribute | ast.Subscript)}

    def fields(self) -> Effects:
        """What others can see of it."""
        made = Effects()
        made.reads = {name for name in self.reads if name.startswith(".")}
        made.writes = {name for name in self.writes if name.startswith(".")}
        made.calls = self.calls
        return made


def of_functions(functions: Iterable[tuple[Function, str]]) -> dict[str, Effects]:
    """Effects of every function of the core, those of what it calls among them; by name."""
    found: dict[str, Effects] = {}
    for function, text in functions:
        effects = Effects()
        for line in function.body:
            plain = covered(text[line.first : line.last])
            for part in (plain, plain.partition("=")[2] if plain.startswith("cdef ") else plain.rstrip(":") + ": pass"):
                try:
                    effects.add(part)
                except SyntaxError:
                    continue
                break
        known = found.setdefault(function.name, Effects())
        known.reads |= effects.fields().reads
        known.writes |= effects.fields().writes
        known.calls |= effects.calls
    grew = True
    while grew:
        grew = False
        for effects in found.values():
            before = len(effects.reads) + len(effects.writes)
            for name in effects.calls & found.keys():
                effects.reads |= found[name].reads
                effects.writes |= found[name].writes
            grew |= len(effects.reads) + len(effects.writes) > before
    return found


def depend(one: str, other: str, known: dict[str, Effects]) -> bool:
    """Whether the order of two statements, in covered text, can make a difference."""
    found = []
    for plain in (one, other):
        effects = Effects()
        try:
            effects.add(plain)
        except SyntaxError:
            return False
        for name in effects.calls & known.keys():
            effects.reads |= known[name].reads
            effects.writes |= known[name].writes
        found.append(effects)
    a, b = found
    made = {name for name in a.writes if not name.startswith(".")} - a.reads  # may have no value before
    return not made & b.reads and bool(a.writes & (b.reads | b.writes) or b.writes & a.reads)
