"""Every comparison, arithmetic operator, constant, branch and call of the nogil functions, wrong in all ways at once.

`mutate` rewrites Cython source so that each of them asks the global `kv_mutant` which one is wrong: ``a < b`` becomes
``(a <= b if kv_mutant == 7 else a >= b if kv_mutant == 8 else a < b)``. 0 is the core as it is.

An expression of a nogil function is Python once casts, address-of and integer suffixes are covered by characters of the
same length and binding; so `ast` says where its parts are, and the rest is text.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOGIL = re.compile(r"^cdef [^\n]*?\b(\w+)\((?:[^()]|\([^()]*\))*\) noexcept nogil:\n", re.MULTILINE)
PREDICATE = re.compile(r"^cdef (?:inline )?bint (\w+)\(", re.MULTILINE)
CAST = re.compile(r"<(?:const )?(?:unsigned )?(?:long )?[A-Za-z_]\w*\s?\**>")
SUFFIX = re.compile(r"\b(0[xX][0-9A-Fa-f]+|\d+)(ULL|LL|U|L)\b")
CONSTANT_NAME = re.compile(r"[A-Z][A-Z0-9_]*$")
IMPORT = re.compile(r"^(?:from|cimport|import|cdef)\b", re.MULTILINE)

COMPARISONS = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
}
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "&",
}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "+=", "&=": "|=", "|=": "&=", "^=": "&=", ">>=": "<<=", "<<=": ">>="}
#: What they return is NULL in a mutant.
POINTERS = {
    *("xcalloc", "xmalloc", "xrealloc", "record_turn", "record_begin"),
    *("put", "put_wide", "put_scalar", "put_ints", "put_slots", "put_words", "put_bytes"),
}
UNTOUCHED = {"seq_table", "sizeof", "range"}  # a pointer that may not be NULL; no calls at all
HEAD = "from kvpool._mutant cimport kv_mutant, kv_set_mutant\n"
SETTER = "\n\ndef set_mutant(int number):\n    kv_set_mutant(number)\n"
#: A header of its own, so that inline functions ask the module that they are compiled into.
MUTANT_PXD = '''cdef extern from *:
    """
    static int kv_mutant = 0;
    #define kv_set_mutant(number) (kv_mutant = (number))
    """
    int kv_mutant
    void kv_set_mutant(int number) noexcept nogil
'''


@dataclass(frozen=True)
class Mutant:
    """One wrong spot; `number` is what chooses it."""

    number: int
    file: str
    function: str
    line: int
    kind: str
    source: str  # the statement
    was: str
    now: str
    key: str  # names it without a line number: it stays when other code moves


def covered(text: str) -> str:
    """`text` as Python that is no longer and no shorter: a cast is a minus, an address a tilde, a comment spaces."""
    text = re.sub(r"#[^\n]*", lambda found: " " * len(found[0]), text)
    text = CAST.sub(lambda found: "-" + " " * (len(found[0]) - 1), text)
    text = SUFFIX.sub(lambda found: found[1] + " " * len(found[2]), text)
    return re.sub(r"(?<=[(,=\[])( *)&|\b(return |else |if |and |or )&", lambda found: found[0][:-1] + "~", text)


def logical_lines(text: str) -> Iterator[tuple[int, int]]:
    """Spans of statements: lines, joined while a bracket is open; docstrings and comments left out."""
    at, in_docstring = 0, False
    start, depth = None, 0
    for line in text.splitlines(keepends=True):
        plain = re.sub(r"#.*", "", line)
        quotes = plain.count('"""')
        if quotes or in_docstring:
            in_docstring ^= quotes == 1
        elif plain.strip() or depth:
            start = at if start is None else start
            depth += sum(plain.count(c) for c in "([") - sum(plain.count(c) for c in ")]")
            if depth == 0:
                yield start + len(text[start:]) - len(text[start:].lstrip()), at + len(plain.rstrip())
                start = None
        at += len(line)


def split_top(text: str, mark: str) -> list[tuple[int, int]]:
    """Spans of `text` between the characters `mark` that stand outside of brackets; '=' is assignment alone."""
    spans, depth, first = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        alone = mark != "=" or (text[i + 1 : i + 2] != "=" and text[i - 1] not in "=<>!+-*&|^")
        if c == mark and depth == 0 and alone:
            spans.append((first, i))
            first = i + 1
    return [*spans, (first, len(text))]


class Schemata:
    """Rewrites one file after the other; `mutants` grows."""

    def __init__(self) -> None:
        self.mutants: list[Mutant] = []
        self.keys: Counter[str] = Counter()
        self.predicates: set[str] = set()  # functions that return a bint

    def file(self, name: str, text: str) -> str:
        """The source with all its mutants in it."""
        made, at = [], 0
        for head in NOGIL.finditer(text):
            body = re.compile(r"(?:[ \t]+[^\n]*\n|[ \t]*\n(?=[ \t\n]))*(?:[ \t]+[^\n]*\n?)?").match(text, head.end())
            made += [text[at : head.end()], self._body(name, head[1], text, body.start(), body.end())]
            at = body.end()
        made.append(text[at:])
        joined = "".join(made)
        first = IMPORT.search(joined).start()
        return joined[:first] + HEAD + joined[first:] + (SETTER if name.endswith(".pyx") else "")

    # ---- statements ---------------------------------------------------------------------------------------

    def _body(self, name: str, function: str, text: str, start: int, end: int) -> str:
        body, made, at = text[start:end], [], 0
        for first, last in logical_lines(body):
            line = text.count("\n", 0, start + first) + 1
            indent = len(body[:first].rpartition("\n")[2])
            made += [body[at:first], Statement(self, (name, function, line), body[first:last], indent).rewritten()]
            at = last
        return "".join([*made, body[at:]])


class Statement:
    """One statement of a nogil function."""

    def __init__(self, schemata: Schemata, where: tuple[str, str, int], text: str, indent: int) -> None:
        self.mutants, self.keys, self.predicates = schemata.mutants, schemata.keys, schemata.predicates
        self.where, self.text, self.indent = where, text, indent
        self.plain = covered(text)

    def rewritten(self) -> str:
        """Its text with its mutants in it."""
        text, word = self.text, re.match(r"\w*", self.text)[0]
        if word in ("else", "pass") or text == "return":
            return text
        if word in ("break", "continue"):
            return f"if kv_mutant != {self.add('branch', text, 'nothing')}: {text}"
        if word in ("if", "elif", "while"):
            return f"{word} {self.expression(len(word), len(self.plain.rstrip()) - 1, condition=True)}:"
        if word == "for":
            first = text.index("range(")
            return text[:first] + self.expression(first, len(self.plain.rstrip()) - 1) + ":"
        if word == "return":
            return "return " + self.expression(len(word), len(text))
        if word == "cdef":
            return self.declaration()
        augmented = re.search(r" ([+*&|^-]=|>>=|<<=) ", self.plain)
        if augmented:
            return self.augmented(augmented)
        sides = split_top(self.plain, "=")
        if len(sides) > 1:
            return " = ".join(self.expression(*side) for side in sides)
        return f"if kv_mutant != {self.add('call', text, 'nothing')}: " + self.expression(0, len(text), whole=False)

    def declaration(self) -> str:
        """``cdef int a = 1, b``: the values."""
        made = []
        for first, last in split_top(self.plain, ","):
            name, *value = split_top(self.plain[first:last], "=")
            made.append(self.text[first : first + name[1]])
            if value:
                made[-1] += "= " + self.expression(first + value[0][0], last)
        return ",".join(made)

    def augmented(self, found: re.Match) -> str:
        """``a += b``: two statements, the right one and the wrong one."""
        operator, other = found[1], ASSIGNMENTS[found[1]]
        target, value = self.text[: found.start()], self.text[found.end() :]
        number = self.add("arithmetic", self.text, f"{target} {other} {value}")
        right = f"{self.expression(0, found.start())} {operator} {self.expression(found.end(), len(self.text))}"
        return f"if kv_mutant == {number}: {target} {other} {value}\n{' ' * self.indent}else: {right}"

    # ---- expressions --------------------------------------------------------------------------------------

    def add(self, kind: str, was: str, now: str) -> int:
        """The number of one more mutant."""
        number = len(self.mutants) + 1
        source, was, now = (" ".join(part.split()) for part in (self.text, was, now))
        key = f"{self.where[1]}: {source} | {was} -> {now}"
        self.keys[key] += 1
        key += f" #{self.keys[key]}" if self.keys[key] > 1 else ""
        self.mutants.append(Mutant(number, *self.where, kind, source, was, now, key))
        return number

    def expression(self, first: int, last: int, *, condition: bool = False, whole: bool = True) -> str:
        """Text from `first` to `last` with its mutants in it; `whole`: the call that it is may be another."""
        tree = ast.parse(f"({self.plain[first:last]})", mode="eval").body
        starts = [first - 1]
        for line in f"({self.plain[first:last]})".splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                node.first = starts[node.lineno - 1] + node.col_offset
                node.last = starts[node.end_lineno - 1] + node.end_col_offset
                node.last += len(re.match(r"(U?LL|U?L|U)?", self.text[node.last :])[0])
        self.whole = tree if not whole else None
        made = self.condition(tree) if condition else self.render(tree)
        return self.text[first : tree.first] + made + self.text[tree.last : last]

    def render(self, node: ast.expr) -> str:
        """The node's text, each part that can be wrong asking for it."""
        made, at = [], node.first
        for child in self.parts(node):
            inner = self.condition(child) if isinstance(node, ast.IfExp) and child is node.test else self.render(child)
            made += [self.text[at : child.first], inner]
            at = child.last
        return self.choice([*self.wrong(node)], "".join([*made, self.text[at : node.last]]), node)

    def condition(self, node: ast.expr) -> str:
        """What a branch asks: it may be taken always, or never."""
        was, inner = self.text[node.first : node.last], self.render(node)
        always, never = self.add("branch", was, "True"), self.add("branch", was, "False")
        return f"(kv_mutant == {always} or (kv_mutant != {never} and ({inner})))"

    def choice(self, wrong: list[tuple[str, str]], right: str, node: ast.expr) -> str:
        """An expression that is one of `wrong`, or `right`; what Cython would make a Python object of is avoided."""
        if not wrong:
            return right
        was = self.text[node.first : node.last]
        numbered = [(self.add(kind, was, now), now) for kind, now in wrong]
        if isinstance(node, ast.Constant | ast.Name):  # no choice between literals
            return f"({right}{''.join(f' {now[len(was) + 1]} (kv_mutant == {n})' for n, now in numbered)})"
        if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            asked = "".join(f"(kv_mutant == {n} and ({now})) or " for n, now in numbered)
            others = " and ".join(f"kv_mutant != {n}" for n, _ in numbered)
            return f"({asked}({others} and ({right})))"
        return f"({''.join(f'({now}) if kv_mutant == {n} else ' for n, now in numbered)}({right}))"

    def parts(self, node: ast.expr) -> list[ast.expr]:
        """The expressions inside that can be wrong on their own, in the order of the text."""
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            return [] if name == "sizeof" else node.args[:2] if name == "range" else node.args
        if isinstance(node, ast.IfExp):
            return [node.body, node.test, node.orelse]
        return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]

    def wrong(self, node: ast.expr) -> Iterator[tuple[str, str]]:
        """What may stand in the node's place."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            for other in COMPARISONS[type(node.ops[0])]:
                yield "comparison", self.between(node, node.left, node.comparators[0], r"[<>=!]=?", other)
        elif isinstance(node, ast.BinOp):
            other = OPERATORS[type(node.op)]
            yield "arithmetic", self.between(node, node.left, node.right, r"<<|>>|//|[-+*%&|^]", other)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield "branch", self.between(node, left, right, rf"\b{word}\b", other)
        elif isinstance(node, ast.UnaryOp) and self.text[node.first] not in "<&":
            yield "arithmetic", self.text[node.operand.first : node.operand.last]
        elif isinstance(node, ast.Constant):
            yield from self.other_constants(node)
        elif isinstance(node, ast.Name) and CONSTANT_NAME.match(node.id) and node.id != "NULL":
            yield "constant", f"{node.id} {'-' if node.id == 'INT64_MAX' else '+'} 1"
        elif isinstance(node, ast.Call) and node is not self.whole:
            yield from self.other_calls(node)

    def between(self, node: ast.expr, left: ast.expr, right: ast.expr, operator: str, other: str) -> str:
        """The node's text with another operator between two of its parts."""
        gap = re.sub(operator, other, self.plain[left.last : right.first], count=1)
        return self.text[node.first : left.last] + gap + self.text[right.first : node.last]

    def other_constants(self, node: ast.Constant) -> Iterator[tuple[str, str]]:
        """Its neighbours."""
        if isinstance(node.value, bool):
            yield "constant", f"{node.value} {'-' if node.value else '+'} 1"
        elif isinstance(node.value, int):
            text = self.text[node.first : node.last]
            yield "constant", f"{text} + 1"
            if 0 < node.value < 1 << 32:
                yield "constant", f"{text} - 1"

    def other_calls(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        """What the call could have returned."""
        name = getattr(node.func, "id", "")
        if name in POINTERS:
            yield "call", "NULL"
        elif name in ("min", "max"):
            swapped = {"min": "max", "max": "min"}[name]
            yield "call", swapped + self.text[node.func.last : node.last]
        elif name == "mix":
            yield "call", self.text[node.args[0].first : node.args[0].last]
        elif name not in UNTOUCHED:
            yield "call", "False" if name in self.predicates else "0"


def mutate(folder: Path) -> tuple[dict[str, str], list[Mutant]]:
    """Rewrite the core in `folder`, the one that holds ``_types.pxd``; nothing is written.

    Returns
    -------
    dict
        File name -> source; ``_mutant.pxd`` is new.
    list of Mutant
        All of them, ``mutants[i].number == i + 1``.
    """
    schemata = Schemata()
    paths = [path for path in sorted(folder.glob("_*.p[yx][xd]")) if path.stem not in ("__init__", "_memory")]
    texts = {path.name: path.read_text() for path in paths}
    schemata.predicates.update(*(PREDICATE.findall(text) for text in texts.values()))
    made = {name: schemata.file(name, text) for name, text in texts.items()}
    return made | {"_mutant.pxd": MUTANT_PXD}, schemata.mutants
