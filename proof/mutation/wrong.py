"""What may stand in the place of an expression: another operator, constant, argument or field, or no call at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from proof.mutation.source import Declarations, Function

COMPARISONS = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
COMPARED = r"not\s+in|is\s+not|\bin\b|\bis\b|[<>=!]=?"
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "&",
}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "+=", "&=": "|=", "|=": "&=", "^=": "&=", ">>=": "<<=", "<<=": ">>="}
ALLOCATORS = {"xcalloc", "xmalloc", "xrealloc"}
UNTOUCHED = {"sizeof", "range"}
NUMBERS = {"bint", "int", "long", "size_t", "Py_ssize_t", "double", "char"}
#: Functions of Python's C interface that return numbers.
NUMBER_CALLS = re.compile(r"Check|_SIZE$|Size$|_AsLong|_Index$")
#: What libraries declare: types of parameters that may be taken for each other.
TAKES = {"memcpy": ["void*", "void*"], "memmove": ["void*", "void*"]}


def is_number(kind: str) -> bool:
    """Whether values of a type are C numbers."""
    return kind in NUMBERS or re.fullmatch(r"u?int\d+_t", kind) is not None


class Types:
    """Types of expressions in one function, as far as declarations tell them."""

    def __init__(self, known: Declarations, function: Function, text: str) -> None:
        self.known, self.nogil, self.module = known, function.nogil, function.file.partition(".")[0]
        self.names = {name: kind for kind, name in function.parameters}
        if function.owner:
            self.names["self"] = function.owner
        for line in function.body:
            words = text[line.first : line.last]
            if words.startswith("cdef "):
                self.names.update(self._declared(words))

    @staticmethod
    def _declared(words: str) -> dict[str, str]:
        found = re.match(r"cdef ((?:const |unsigned )?\w+) ?(.*)", words, re.DOTALL)
        names = re.findall(r"(?:^|, )\s*(\**)\s*(\w+)", found[2])
        return {name: found[1].removeprefix("const ") + stars for stars, name in names}

    def of(self, node: ast.expr) -> str:
        """The type, "" where it is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return self.known.field_of(self._owner(node), node.attr)
        if isinstance(node, ast.Subscript):
            kind = self.of(node.value).removeprefix("const ")
            return kind[:-1] if kind.endswith("*") else ""
        return ""

    def _owner(self, node: ast.Attribute) -> str:
        return self.of(node.value).removeprefix("const ").rstrip("*")

    def another_field(self, node: ast.expr) -> str:
        """The field that may be taken for the one that `node` names."""
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._owner(node)
        return self.known.another(owner, node.attr) if owner else ""

    def result(self, node: ast.Call) -> str | None:
        """What a call can be in place of what it returns; None: nothing that compiles."""
        name = name_of(node)
        found = self.known.returns.get(name, {})
        kinds = {found[self.module]} if self.module in found else set(found.values())
        if name in ALLOCATORS or (name in self.known.nullable and all(kind.endswith("*") for kind in kinds)):
            return "NULL"
        if not kinds:
            return "False" if name in ("isinstance", "hasattr", "any", "all") else self._unknown(name)
        if kinds == {"bint"}:
            return "False"
        if all(map(is_number, kinds)):
            return "0"
        structs = self.known.fields.keys() - self.known.classes
        return None if kinds & structs or any("*" in kind or kind == "void" for kind in kinds) else "<object>None"

    def _unknown(self, name: str) -> str | None:
        """Of a library: C or Python."""
        numbers = ("len", "memcmp", "strlen", "int", "abs")
        if name.startswith("Py") and not NUMBER_CALLS.search(name):
            return None
        return "0" if self.nogil or name in numbers or name.startswith("Py") else "<object>None"


def name_of(node: ast.Call) -> str:
    """Name of what is called."""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def is_text(node: ast.expr) -> bool:
    """Whether C writes a text here: ``snprintf(...) > 0``."""
    return isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and name_of(node.left) == "snprintf"


class Wrong:
    """What may stand in the place of parts of one statement: (kind, text)."""

    def __init__(self, types: Types, text: str, plain: str, nogil: bool) -> None:
        self.types, self.text, self.plain, self.nogil = types, text, plain, nogil

    def of(self, node: ast.expr) -> Iterator[tuple[str, str]]:
        """All of it."""
        if isinstance(node, ast.Compare):
            yield from self.comparisons(node)
        elif isinstance(node, ast.BinOp):
            if not any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right)):
                other = OPERATORS[type(node.op)]
                yield "arithmetic", self.between(node, node.left, node.right, r"<<|>>|//|[-+*%&|^/]", other)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield "branch", self.between(node, left, right, rf"\b{word}\b", other)
        elif isinstance(node, ast.UnaryOp):
            yield from self.unary(node)
        elif isinstance(node, ast.Constant):
            yield from self.constants(node)
        elif isinstance(node, ast.Name) and node.id in self.types.known.constants:
            yield "constant", f"{node.id} {'-' if node.id.endswith('_MAX') else '+'} 1"
        elif isinstance(node, ast.Call):
            yield from self.calls(node)
        elif isinstance(node, ast.Attribute) and (other := self.types.another_field(node)):
            yield "field", self.with_field(node, other)

    def comparisons(self, node: ast.Compare) -> Iterator[tuple[str, str]]:
        """Of a chain, one after the other; a text is written for its words, not for how long it is."""
        if is_text(node):
            return
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            for other in COMPARISONS[type(operator)]:
                yield "comparison", self.between(node, left, right, COMPARED, other)

    def unary(self, node: ast.UnaryOp) -> Iterator[tuple[str, str]]:
        """A sign or a `not` that is not there; the address of another field."""
        if self.text[node.first] == "&":
            if other := self.types.another_field(node.operand):
                yield "field", "&" + self.with_field(node.operand, other)
        elif self.text[node.first] != "<":
            yield "arithmetic", self.text[node.operand.first : node.operand.last]

    def with_field(self, node: ast.Attribute, other: str) -> str:
        """The node's text with another field."""
        return self.text[node.first : node.last - len(node.attr)] + other

    def between(self, node: ast.expr, left: ast.expr, right: ast.expr, operator: str, other: str) -> str:
        """The node's text with another operator between two of its parts."""
        gap = re.sub(operator, other, self.plain[left.last : right.first], count=1)
        return self.text[node.first : left.last] + gap + self.text[right.first : node.last]

    def constants(self, node: ast.Constant) -> Iterator[tuple[str, str]]:
        """Its neighbours."""
        text = self.text[node.first : node.last]
        if isinstance(node.value, bool):
            yield "constant", f"{text} {'-' if node.value else '+'} 1" if self.nogil else str(not node.value)
        elif isinstance(node.value, int):
            yield "constant", f"{text} + 1"
            if 0 < node.value < 1 << 32:
                yield "constant", f"{text} - 1"

    def calls(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        """What the call could have returned, and what it returns when arguments are swapped."""
        name = name_of(node)
        if name in ("min", "max"):
            swapped = {"min": "max", "max": "min"}[name]
            yield "call", swapped + self.text[node.func.last : node.last]
        elif name == "mix":
            yield "call", self.text[node.args[0].first : node.args[0].last]
        elif name not in UNTOUCHED and (result := self.types.result(node)) is not None:
            yield "call", result
        yield from (("swap", text) for text in self.swapped(node))

    def swapped(self, node: ast.Call) -> Iterator[str]:
        """The call with two neighbours of one type in the wrong order."""
        signatures = self.types.known.takes.get(name_of(node)) or [TAKES.get(name_of(node), [])]
        fitting = [kinds for kinds in signatures if len(kinds) >= len(node.args)] or [[]]
        for k, (left, right) in enumerate(zip(node.args, node.args[1:], strict=False)):
            one, two = self.text[left.first : left.last], self.text[right.first : right.last]
            texts = any(isinstance(side, ast.JoinedStr) or self._is_text(side) for side in (left, right))
            same = all(k + 1 < len(kinds) and alike(kinds[k], kinds[k + 1]) for kinds in fitting)
            if same and one != two and not texts:
                gap = self.text[left.last : right.first]
                yield self.text[node.first : left.first] + two + gap + one + self.text[right.last : node.last]

    @staticmethod
    def _is_text(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def alike(one: str, other: str) -> bool:
    """Whether C takes a value of one type for the other without a word."""
    return (is_number(one) and is_number(other)) or (one == other and one not in ("", "str"))
