"""The core's functions, those with Python objects too, wrong in all ways at once.

`mutate` rewrites Cython source so that each spot asks `kv_is` which one is wrong: ``a < b`` becomes
``(a <= b if kv_is(7) else a >= b if kv_is(8) else a < b)``. Mutant 0 is the core as it is. `kv_is` notes who asked, so
that it is known which mutants a test reaches.

Wrong are comparisons, operators, constants, conditions, calls and what they are given, fields, assignments, refusals
that are left out. Error texts stay as they are, and so does what runs at import, once.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.verify.mutants import source
from tests.verify.mutants.source import Declarations, Function, Line, covered, functions, split_top

HEAD = "from kvpool._mutant cimport KV_MUTANTS, kv_is, kv_reached, kv_set_mutant\n"
SETTER = """

def set_mutant(int number):
    kv_set_mutant(number)


def mutants_reached():
    return (<const char*>kv_reached)[:KV_MUTANTS]


def forget_reached():
    cdef int k
    for k in range(KV_MUTANTS):
        kv_reached[k] = 0
"""
#: A header of its own, so that inline functions ask the module that they are compiled into.
MUTANT_PXD = '''cdef extern from *:
    """
    enum {{ KV_MUTANTS = {count} }};
    static int kv_mutant = 0;
    static unsigned char kv_reached[KV_MUTANTS];
    #define kv_is(number) (kv_reached[number] = 1, kv_mutant == (number))
    #define kv_set_mutant(number) (kv_mutant = (number))
    """
    int KV_MUTANTS
    unsigned char* kv_reached
    bint kv_is(int number) noexcept nogil
    void kv_set_mutant(int number) noexcept nogil
'''
KEPT = ("else", "pass", "try", "finally", "except", "with", "global", "import", "from", "assert")
COMPARISONS = {
    **{ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<")},
    **{ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",)},
    **{ast.In: ("not in",), ast.NotIn: ("in",)},
}
COMPARED = r"not\s+in|is\s+not|\bin\b|\bis\b|[<>=!]=?"
OPERATORS = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"},
    **{ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&"},
}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "+=", "&=": "|=", "|=": "&=", "^=": "&=", ">>=": "<<=", "<<=": ">>="}
ALLOCATORS = ("xcalloc", "xmalloc", "xrealloc")
UNTOUCHED = ("sizeof", "range")
#: Calls that write down why something is refused: numbers from this argument on are for its text.
WORDS_FROM = {"refused": 2, "blocks_short": 2}
#: Of libraries: types of parameters that may be taken for each other; functions that return numbers.
TAKES = {"memcpy": ["void*", "void*"], "memmove": ["void*", "void*"]}
NUMBER = re.compile(r"bint|int|long|size_t|Py_ssize_t|double|char|u?int\d+_t")
NUMBER_CALLS = re.compile(r"Py\w*(?:Check|_SIZE$|Size$|_AsLong|_Index$)|(?:len|memcmp|strlen|int|abs)$")


def name_of(node: ast.expr) -> str:
    called = getattr(node, "func", None)
    return getattr(called, "id", "") or getattr(called, "attr", "")


def writes_text(node: ast.expr) -> bool:
    """Whether C writes one: ``snprintf(...) > 0``."""
    return isinstance(node, ast.Compare) and name_of(node.left) == "snprintf"


def alike(kinds: list[str], k: int) -> bool:
    """Whether C takes parameter `k` for the next one without a word."""
    one, other = kinds[k : k + 2] if k + 1 < len(kinds) else ("", "")
    return all(map(NUMBER.fullmatch, (one, other))) or (one == other and one not in ("", "str"))


# ---- the mutants -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One wrong spot; `number` is what chooses it."""

    number: int
    file: str
    line: int
    key: str  # ``function: statement | was -> now``, without a line number: it stays when other code moves


class Schemata:
    """Rewrites one file after the other; `mutants` grows."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.mutants: list[Mutant] = []
        self.keys: Counter[str] = Counter()
        self.known = source.declarations(texts)

    def file(self, name: str, text: str) -> str:
        """The source with all its mutants in it."""
        made, at = [], 0
        for function in functions(name, text):
            types = Types(self.known, function, text)
            for line in function.body:
                made += [text[at : line.first], Statement(self, types, function, line, text).rewritten()]
                at = line.last
        joined = "".join([*made, text[at:]])
        first = next(source.logical_lines(joined), Line(0, 0, 0, 0)).first
        return joined[:first] + HEAD + joined[first:] + SETTER * name.endswith(".pyx")


class Types:
    """Types of expressions in one function, as far as declarations tell them."""

    def __init__(self, known: Declarations, function: Function, text: str) -> None:
        self.known, self.nogil, self.module = known, function.nogil, function.file.partition(".")[0]
        self.names = {name: kind for kind, name in function.parameters}
        if function.owner:
            self.names["self"] = function.owner
        for line in function.body:
            words = text[line.first : line.last]
            if found := re.match(r"cdef ((?:const |unsigned )?\w+) ?(.*)", words, re.DOTALL):
                for stars, name in re.findall(r"(?:^|, )\s*(\**)\s*(\w+)", found[2]):
                    self.names[name] = found[1].removeprefix("const ") + stars

    def of(self, node: ast.expr) -> str:
        """The type, "" where it is not known."""
        if isinstance(node, ast.Attribute):
            return self.known.fields.get(self.owner(node), {}).get(node.attr, "")
        if isinstance(node, ast.Subscript):
            kind = self.of(node.value).removeprefix("const ")
            return kind[:-1] if kind.endswith("*") else ""
        return self.names.get(getattr(node, "id", ""), "")

    def owner(self, node: ast.Attribute) -> str:
        return self.of(node.value).removeprefix("const ").rstrip("*")

    def result(self, name: str) -> str | None:
        """What a call can be in place of what it returns; None: nothing that compiles."""
        found = self.known.returns.get(name, {})
        kinds = {found[self.module]} if self.module in found else set(found.values())
        if name in ALLOCATORS or (name in self.known.nullable and all(kind.endswith("*") for kind in kinds)):
            return "NULL"
        if kinds == {"bint"} or (not kinds and name in ("isinstance", "hasattr", "any", "all")):
            return "False"
        numbers = all(map(NUMBER.fullmatch, kinds)) if kinds else NUMBER_CALLS.match(name)
        if numbers or (not kinds and self.nogil and not name.startswith("Py")):
            return "0"
        structures = self.known.fields.keys() - self.known.classes
        is_c = any("*" in kind or kind == "void" or kind in structures for kind in kinds)
        return None if is_c or (not kinds and name.startswith("Py")) else "<object>None"


class Statement:
    def __init__(self, schemata: Schemata, types: Types, function: Function, line: Line, text: str) -> None:
        self.schemata, self.types, self.function, self.line = schemata, types, function, line
        self.text = text[line.first : line.last]
        self.plain = covered(self.text)
        self.instead: list[tuple[int, str]] = []  # (mutant, what it does in place of this statement)

    # ---- whole statements

    def rewritten(self) -> str:
        """Its text with its mutants in it."""
        main = self.main()
        lines = [f"{'elif' if k else 'if'} kv_is({number}): {text}" for k, (number, text) in enumerate(self.instead)]
        lines.append(f"else: {main}" if self.instead else main)
        return ("\n" + " " * self.line.indent).join(lines)

    def main(self) -> str:
        """The statement itself, its expressions asking for mutants."""
        text, word = self.text, re.match(r"\w*", self.text)[0]
        if word in KEPT or text.startswith("@"):
            return text
        if word in ("break", "continue", "raise", "del") or text == "return":
            self.replaced("pass", "nothing")
            return text
        if word in ("if", "elif", "while"):
            return f"{word} {self.expression(len(word), len(self.plain.rstrip()) - 1, Statement.condition)}:"
        if word == "for":
            first = self.plain.index(" in ") + 3
            return text[:first] + self.expression(first, len(self.plain.rstrip()) - 1) + ":"
        if word == "return":
            return "return " + self.expression(len(word), len(text))
        if word == "cdef":
            return self.declaration()
        if augmented := re.search(r" ([+*&|^-]=|>>=|<<=) ", self.plain):
            return self.augmented(augmented)
        sides = split_top(self.plain, "=")
        return self.assignment(sides) if len(sides) > 1 else self.call()

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
        """``a += b``: it subtracts, is not made, or goes to another field."""
        operator, target, value = found[1], self.text[: found.start()], self.text[found.end() :]
        if not re.match(r"f?[\"']", value):
            self.replaced(f"{target} {ASSIGNMENTS[operator]} {value}")
        tree = self.parsed(0, found.start())
        if not isinstance(tree, ast.Name):
            self.replaced("pass", "nothing")
        if other := self.with_other_field(tree):
            self.replaced(f"{other} {operator} {value}")
        made = self.expression(0, found.start(), Statement.place)
        return f"{made} {operator} {self.expression(found.end(), len(self.text))}"

    def assignment(self, sides: list[tuple[int, int]]) -> str:
        """``a = b = value``: each target is left out once, and is another field once; a local name stays."""
        *targets, value = [self.text[first:last].strip() for first, last in sides]
        for k, (first, last) in enumerate(sides[:-1]):
            tree = self.parsed(first, last)
            others = targets[:k] + targets[k + 1 :]
            if isinstance(tree, ast.Attribute | ast.Subscript):
                rest = " = ".join([*others, value])
                self.replaced(rest if others else "pass", rest if others else "nothing")
            if other := self.with_other_field(tree):
                self.replaced(" = ".join([*targets[:k], other, *targets[k + 1 :], value]))
        made = [self.expression(*side, Statement.place) for side in sides[:-1]]
        return "=".join([*made, self.expression(*sides[-1])])

    def call(self) -> str:
        """A call for what it does: it is not made, or is given the wrong things."""
        tree = self.parsed(0, len(self.text))
        self.replaced("pass", "nothing")
        for other in self.swapped(tree):
            self.replaced(other)
        return self.expression(0, len(self.text), lambda self, tree: self.render(tree, ()))

    def add(self, was: str, now: str) -> int:
        schemata = self.schemata
        source, was, now = (" ".join(part.split()) for part in (self.text, was, now))
        key = f"{self.function.name}: {source} | {was} -> {now}"
        schemata.keys[key] += 1
        key += f" #{schemata.keys[key]}" if schemata.keys[key] > 1 else ""
        schemata.mutants.append(Mutant(len(schemata.mutants) + 1, self.function.file, self.line.number, key))
        return len(schemata.mutants)

    def replaced(self, text: str, now: str = "") -> None:
        """A mutant that does something else in place of the whole statement."""
        self.instead.append((self.add(self.text, now or text), text))

    # ---- expressions: their text, each part that can be wrong asking for it

    def parsed(self, first: int, last: int) -> ast.expr:
        """The tree of the text from `first` to `last`, its nodes with their places in the statement."""
        text = f"({self.plain[first:last]})"
        tree = ast.parse(text, mode="eval").body
        starts = [first - 1]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                node.first = starts[node.lineno - 1] + node.col_offset
                node.last = starts[node.end_lineno - 1] + node.end_col_offset
                node.last += len(re.match(r"(U?LL|U?L|U)?", self.text[node.last :])[0])
        if tree.first < first:  # a tuple takes the brackets for its own
            tree.first, tree.last = tree.elts[0].first, tree.elts[-1].last
        return tree

    def of(self, node: ast.expr) -> str:
        return self.text[node.first : node.last]

    def expression(self, first: int, last: int, how: Callable[[Statement, ast.expr], str] | None = None) -> str:
        """Text from `first` to `last` with its mutants in it; `how`: that of a condition, or of what is assigned to."""
        tree = self.parsed(first, last)
        made = how(self, tree) if how else self.render(tree)
        return self.text[first : tree.first] + made + self.text[tree.last : last]

    def place(self, node: ast.expr) -> str:
        """A place in memory: what it is a place of may be wrong, as long as that is a pointer."""
        if not isinstance(node, ast.Subscript | ast.Attribute):
            return self.of(node)
        value = node.value
        rvalue = self.types.of(value).endswith("*") or isinstance(value, ast.UnaryOp | ast.Call)
        made = self.text[node.first : value.first] + (self.render(value) if rvalue else self.place(value))
        if isinstance(node, ast.Attribute):
            return made + self.text[value.last : node.last]
        index = self.render(node.slice)
        return made + self.text[value.last : node.slice.first] + index + self.text[node.slice.last : node.last]

    def render(self, node: ast.expr, wrong: Iterable[str] | None = None) -> str:
        """The text of an expression. `wrong`: what it can be, () of a call for what it does: nobody reads it."""
        if isinstance(node, ast.UnaryOp) and self.text[node.first] == "&":
            made, at = [self.text[node.first : node.operand.first], self.place(node.operand)], node.operand.last
        else:
            made, at = [], node.first
            for child, asked in sorted(self.parts(node), key=lambda part: part[0].first):
                made += [self.text[at : child.first], self.condition(child) if asked else self.render(child)]
                at = child.last
        wrong = self.wrong(node) if wrong is None else wrong
        return self.choice(wrong, "".join([*made, self.text[at : node.last]]), node)

    def condition(self, node: ast.expr) -> str:
        """What a branch asks: it may be taken always, or never."""
        was, inner = self.of(node), self.render(node)
        always, never = self.add(was, "True"), self.add(was, "False")
        return f"(kv_is({always}) or (not kv_is({never}) and ({inner})))"

    def choice(self, wrong: Iterable[str], right: str, node: ast.expr) -> str:
        """An expression that is one of `wrong`, or `right`; what Cython would make a Python object of is avoided."""
        was = self.of(node)
        numbered = [(self.add(was, now), now) for now in wrong]
        if not numbered:
            return right
        literal = isinstance(node, ast.Constant | ast.Name)
        if literal and (self.function.nogil or not isinstance(getattr(node, "value", 0), bool)):
            return f"({right}{''.join(f' {now[len(was) + 1]} kv_is({n})' for n, now in numbered)})"
        if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            # Cython 3.3 takes `x == A and x == B` for one switch, as if it said `or`: what stands between prevents it.
            apart = [(n, re.sub(r"\band\b", "and not kv_is(0) and", now)) for n, now in numbered]
            asked = "".join(f"(kv_is({n}) and ({now})) or " for n, now in apart)
            others = " and ".join(f"not kv_is({n})" for n, _ in numbered)
            return f"({asked}({others} and ({right})))"
        return f"({''.join(f'({now}) if kv_is({n}) else ' for n, now in numbered)}({right}))"

    def parts(self, node: ast.expr) -> list[tuple[ast.expr, bool]]:
        """The expressions inside that can be wrong on their own, and whether they decide which way to go."""
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            args = [] if name in ("sizeof", "snprintf") else node.args[:2] if name == "range" else node.args
            told = [arg for arg in args[WORDS_FROM.get(name, 99) :] if re.fullmatch(r"-?\d+", self.of(arg))]
            called = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            given = [*called, *(arg for arg in args if arg not in told), *(word.value for word in node.keywords)]
            return [(child, False) for child in given]
        if isinstance(node, ast.IfExp):
            return [(node.body, False), (node.test, True), (node.orelse, False)]
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            return []
        if writes_text(node):
            return [(node.left, False)]
        found = [(child, False) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        for loop in getattr(node, "generators", ()):
            found += [(loop.iter, False), *((test, True) for test in loop.ifs)]
        return found

    # ---- what may stand in the place of an expression

    def wrong(self, node: ast.expr) -> Iterator[str]:
        text = self.of(node)
        if isinstance(node, ast.Compare) and not writes_text(node):
            for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
                for other in COMPARISONS[type(operator)]:
                    yield self.between(node, left, right, COMPARED, other)
        elif isinstance(node, ast.BinOp):
            if not any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right)):
                yield self.between(node, node.left, node.right, r"<<|>>|//|[-+*%&|^/]", OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield self.between(node, left, right, rf"\b{word}\b", other)
        elif isinstance(node, ast.UnaryOp):
            if text[0] == "&":
                if other := self.with_other_field(node.operand):
                    yield "&" + other
            elif text[0] != "<":
                yield self.of(node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield f"{text} {'-' if node.value else '+'} 1" if self.function.nogil else str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield f"{text} + 1"
            if 0 < node.value < 1 << 32:
                yield f"{text} - 1"
        elif isinstance(node, ast.Name) and node.id in self.types.known.constants:
            yield f"{node.id} {'-' if node.id.endswith('_MAX') else '+'} 1"
        elif isinstance(node, ast.Call):
            yield from self.calls(node)
        elif other := self.with_other_field(node):
            yield other

    def with_other_field(self, node: ast.expr) -> str:
        """The node's text with another field, "" if there is none."""
        if not isinstance(node, ast.Attribute):
            return ""
        other = self.types.known.another(self.types.owner(node), node.attr)
        return self.text[node.first : node.last - len(node.attr)] + other if other else ""

    def between(self, node: ast.expr, left: ast.expr, right: ast.expr, operator: str, other: str) -> str:
        """The node's text with another operator between two of its parts."""
        gap = re.sub(operator, other, self.plain[left.last : right.first], count=1)
        return self.text[node.first : left.last] + gap + self.text[right.first : node.last]

    def calls(self, node: ast.Call) -> Iterator[str]:
        """What the call could have returned, and what it returns when arguments are swapped."""
        name = name_of(node)
        if name in ("min", "max"):
            yield {"min": "max", "max": "min"}[name] + self.text[node.func.last : node.last]
        elif name == "mix":
            yield self.of(node.args[0])
        elif name not in UNTOUCHED and (result := self.types.result(name)) is not None:
            yield result
        yield from self.swapped(node)

    def swapped(self, node: ast.expr) -> Iterator[str]:
        """A call with two neighbours of one type in the wrong order."""
        if not isinstance(node, ast.Call):
            return
        signatures = self.types.known.takes.get(name_of(node)) or [TAKES.get(name_of(node), [])]
        fitting = [kinds for kinds in signatures if len(kinds) >= len(node.args)] or [[]]
        for k, (left, right) in enumerate(pairwise(node.args)):
            one, two, gap = self.of(left), self.of(right), self.text[left.last : right.first]
            texts = [isinstance(getattr(arg, "value", arg), str | bytes | ast.JoinedStr) for arg in (left, right)]
            if one != two and all(alike(kinds, k) for kinds in fitting) and not any(texts):
                yield self.text[node.first : left.first] + two + gap + one + self.text[right.last : node.last]


def mutate(paths: Iterable[Path]) -> tuple[dict[Path, str], list[Mutant]]:
    """Sources with all mutants in them, a header of theirs beside the first, and the mutants, the first is number 1."""
    texts = {path: path.read_text() for path in paths}
    schemata = Schemata({path.name: text for path, text in texts.items()})
    made = {path: schemata.file(path.name, text) for path, text in texts.items()}
    header = MUTANT_PXD.format(count=len(schemata.mutants) + 1)
    return made | {next(iter(texts)).with_name("_mutant.pxd"): header}, schemata.mutants
