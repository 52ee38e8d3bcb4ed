"""The core's functions, those with Python objects too, wrong in all ways at once.

`mutate` rewrites Cython source so that each spot asks `kv_is` which one is wrong: ``a < b`` becomes
``(a <= b if kv_is(7) else a >= b if kv_is(8) else a < b)``. Mutant 0 is the core as it is. `kv_is` notes who asked, so
that it is known which mutants a program reaches.

Wrong are comparisons, operators, constants, conditions, calls and what they are given, fields, assignments, statements
in the wrong order, refusals that are left out. Error texts stay as they are, and so does what runs at import, once.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from proof.mutation.aside import REFUSALS, aside
from proof.mutation.order import depend, of_functions
from proof.mutation.source import Function, Line, covered, declarations, functions, logical_lines, split_top
from proof.mutation.wrong import ASSIGNMENTS, Types, Wrong, is_text, name_of

HEAD = "from {package}._mutant cimport KV_MUTANTS, kv_is, kv_live, kv_reached, kv_set_mutant\n"
SETTER = """

def set_mutant(int number):
    kv_set_mutant(number)


def mutants_reached():
    return (<const char*>kv_reached)[:KV_MUTANTS]


def forget_reached():
    cdef int k
    for k in range(KV_MUTANTS):
        kv_reached[k] = 0


def live_arrays():
    return kv_live
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
    long kv_live
    unsigned char* kv_reached
    bint kv_is(int number) noexcept nogil
    void kv_set_mutant(int number) noexcept nogil
'''
LITERAL = re.compile(r"-?\d+")
KEPT = ("else", "pass", "try", "finally", "except", "with", "global", "import", "from", "assert")
NO_VALUE = ("cdef", "return", "raise", "break", "continue", "del", "for", "if", "elif", "while", "@", "yield")


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
    aside: str  # why no judge of results is asked about it, or ""


class Schemata:
    """Rewrites one file after the other; `mutants` grows."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.mutants: list[Mutant] = []
        self.keys: Counter[str] = Counter()
        self.known = declarations(texts)
        self.effects = of_functions((made, text) for name, text in texts.items() for made in functions(name, text))

    def file(self, name: str, text: str, package: str = "kvpool") -> str:
        """The source with all its mutants in it."""
        made, at = [], 0
        for function in functions(name, text):
            types = Types(self.known, function, text)
            body = [Statement(self, types, function, line, text) for line in function.body]
            for one, two in pairwise(body):
                one.before(two)
            for statement in body:
                line = statement.line
                made += [text[at : line.first], statement.rewritten()]
                at = line.last
        joined = "".join([*made, text[at:]])
        first = next(logical_lines(joined), Line(0, 0, 0, 0)).first
        setter = SETTER if name.endswith(".pyx") else ""
        return joined[:first] + HEAD.format(package=package) + joined[first:] + setter


class Statement:
    """One statement of a function."""

    def __init__(self, schemata: Schemata, types: Types, function: Function, line: Line, text: str) -> None:
        self.schemata, self.types, self.function, self.line = schemata, types, function, line
        self.text = text[line.first : line.last]
        self.plain = covered(self.text)
        self.word = re.match(r"\w*", self.text)[0]
        self.wrong = Wrong(types, self.text, self.plain, function.nogil)
        self.in_text = False  # of a refusal: what follows its reason
        self.first: list[tuple[int, str]] = []  # (mutant, what it does before this statement)
        self.instead: list[tuple[int, str]] = []  # (mutant, what it does in place of this statement)

    # ---- whole statements ---------------------------------------------------------------------------------

    @property
    def simple(self) -> bool:
        """Whether it is an assignment or a call."""
        return self.word not in KEPT + NO_VALUE and not self.text.startswith("@") and not self.text.endswith(":")

    def before(self, following: Statement) -> None:
        """A mutant that does the following statement first, if that could matter."""
        neighbours = self.simple and following.simple and self.line.indent == following.line.indent
        if neighbours and depend(self.plain, following.plain, self.schemata.effects):
            number = self.add("order", self.text, f"after {following.text}")
            self.first.append((number, following.text))
            following.instead.append((number, "pass"))

    def rewritten(self) -> str:
        """Its text with its mutants in it."""
        main = self.main()
        if not self.first and not self.instead:
            return main
        lines = [f"if kv_is({number}): {text}" for number, text in self.first]
        lines += [f"{'elif' if k else 'if'} kv_is({number}): {text}" for k, (number, text) in enumerate(self.instead)]
        lines.append(f"else: {main}" if self.instead else main)
        return ("\n" + " " * self.line.indent).join(lines)

    def main(self) -> str:
        """The statement itself, its expressions asking for mutants."""
        text, word = self.text, self.word
        if word in KEPT or text.startswith("@") or (word == "lambda"):
            return text
        if word in ("break", "continue", "raise", "del") or text == "return":
            self.replaced("refusal" if word == "raise" else "branch", text, "pass", "nothing")
            return text
        if word in ("if", "elif", "while"):
            return f"{word} {self.expression(len(word), len(self.plain.rstrip()) - 1, condition=True)}:"
        if word == "for":
            first = re.search(r"\bin\b", self.plain).end()
            return text[:first] + self.expression(first, len(self.plain.rstrip()) - 1) + ":"
        if word == "return":
            return "return " + self.expression(len(word), len(text))
        if word == "cdef":
            return self.declaration()
        augmented = re.search(r" ([+*&|^-]=|>>=|<<=) ", self.plain)
        if augmented:
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
        operator, other = found[1], ASSIGNMENTS[found[1]]
        target, value = self.text[: found.start()], self.text[found.end() :]
        if not re.match(r"f?[\"']", value):
            self.replaced("arithmetic", self.text, f"{target} {other} {value}")
        tree = self.parsed(0, found.start())
        if not isinstance(tree, ast.Name):
            self.replaced("dropped", self.text, "pass", "nothing")
        if field := self.types.another_field(tree):
            self.replaced("field", self.text, f"{self.wrong.with_field(tree, field)} {operator} {value}")
        return f"{self.target(0, found.start())} {operator} {self.expression(found.end(), len(self.text))}"

    def assignment(self, sides: list[tuple[int, int]]) -> str:
        """``a = b = value``: each target is left out once, and is another field once; a local name stays."""
        *targets, value = [self.text[first:last].strip() for first, last in sides]
        for k, (first, last) in enumerate(sides[:-1]):
            tree = self.parsed(first, last)
            others = targets[:k] + targets[k + 1 :]
            if isinstance(tree, ast.Attribute | ast.Subscript):
                rest = " = ".join([*others, value]) if others else "pass"
                self.replaced("dropped", self.text, rest, rest if others else "nothing")
            if field := self.types.another_field(tree):
                there = [*targets[:k], self.wrong.with_field(tree, field), *targets[k + 1 :], value]
                self.replaced("field", self.text, " = ".join(there))
        made = [self.target(*side) for side in sides[:-1]]
        return "=".join([*made, self.expression(*sides[-1])])

    def call(self) -> str:
        """A call for what it does: it is not made, or is given the wrong things."""
        tree = self.parsed(0, len(self.text))
        self.replaced("call", self.text, "pass", "nothing")
        if isinstance(tree, ast.Call):
            self.in_text = name_of(tree) in REFUSALS
            for other in self.wrong.swapped(tree):
                self.replaced("swap", self.text, other)
            self.in_text = False
        return self.expression(0, len(self.text), whole=False)

    # ---- expressions --------------------------------------------------------------------------------------

    def add(self, kind: str, was: str, now: str) -> int:
        """The number of one more mutant."""
        schemata, function = self.schemata, self.function
        number = len(schemata.mutants) + 1
        source, was, now = (" ".join(part.split()) for part in (self.text, was, now))
        key = f"{function.name}: {source} | {was} -> {now}"
        schemata.keys[key] += 1
        key += f" #{schemata.keys[key]}" if schemata.keys[key] > 1 else ""
        why = aside(function, source) or ("error texts" if self.in_text else "")
        where = (function.file, function.name, self.line.number)
        schemata.mutants.append(Mutant(number, *where, kind, source, was, now, key, why))
        return number

    def replaced(self, kind: str, was: str, text: str, now: str = "") -> None:
        """A mutant that does something else in place of the whole statement."""
        self.instead.append((self.add(kind, was, now or text), text))

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

    def expression(self, first: int, last: int, *, condition: bool = False, whole: bool = True) -> str:
        """Text from `first` to `last` with its mutants in it; `whole`: the call that it is may be another."""
        tree = self.parsed(first, last)
        self.whole = tree if not whole else None
        made = self.condition(tree) if condition else self.render(tree)
        return self.text[first : tree.first] + made + self.text[tree.last : last]

    def target(self, first: int, last: int) -> str:
        """The same of what is assigned to: the place stays one."""
        tree = self.parsed(first, last)
        self.whole = None
        return self.text[first : tree.first] + self.place(tree) + self.text[tree.last : last]

    def place(self, node: ast.expr) -> str:
        """A place in memory: what it is a place of may be wrong, as long as that is a pointer."""
        if isinstance(node, ast.Subscript | ast.Attribute):
            value = node.value
            rvalue = self.types.of(value).endswith("*") or isinstance(value, ast.UnaryOp | ast.Call)
            made = self.text[node.first : value.first] + (self.render(value) if rvalue else self.place(value))
            if isinstance(node, ast.Attribute):
                return made + self.text[value.last : node.last]
            place = self.text[value.last : node.slice.first] + self.render(node.slice)
            return made + place + self.text[node.slice.last : node.last]
        return self.text[node.first : node.last]

    def render(self, node: ast.expr) -> str:
        """The node's text, each part that can be wrong asking for it."""
        if isinstance(node, ast.UnaryOp) and self.text[node.first] == "&":
            inside = self.text[node.first : node.operand.first] + self.place(node.operand)
            return self.choice([*self.wrong.of(node)], inside + self.text[node.operand.last : node.last], node)
        made, at = [], node.first
        for child, asked in sorted(self.parts(node), key=lambda part: part[0].first):
            before, self.in_text = self.in_text, self.in_text or self.in_words(node, child)
            if self.in_text and LITERAL.fullmatch(self.text[child.first : child.last]):
                self.in_text = before  # nothing is to be told there
                continue
            made += [self.text[at : child.first], self.condition(child) if asked else self.render(child)]
            self.in_text = before
            at = child.last
        wrong = [] if node is self.whole else [*self.wrong.of(node)]
        return self.choice(wrong, "".join([*made, self.text[at : node.last]]), node)

    def condition(self, node: ast.expr) -> str:
        """What a branch asks: it may be taken always, or never."""
        was, inner = self.text[node.first : node.last], self.render(node)
        always, never = self.add("branch", was, "True"), self.add("branch", was, "False")
        return f"(kv_is({always}) or (not kv_is({never}) and ({inner})))"

    def choice(self, wrong: Iterable[tuple[str, str]], right: str, node: ast.expr) -> str:
        """An expression that is one of `wrong`, or `right`; what Cython would make a Python object of is avoided."""
        was = self.text[node.first : node.last]
        before, numbered = self.in_text, []
        for kind, now in wrong:
            self.in_text = before or (kind == "swap" and name_of(node) in REFUSALS)
            numbered.append((self.add(kind, was, now), now))
        self.in_text = before
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

    def in_words(self, call: ast.expr, part: ast.expr) -> bool:
        """Whether an argument only tells in which words something is refused."""
        if not isinstance(call, ast.Call) or part not in call.args:
            return False
        place = call.args.index(part)
        return place >= REFUSALS.get(name_of(call), 99) or place in self.schemata.known.words.get(name_of(call), ())

    def parts(self, node: ast.expr) -> list[tuple[ast.expr, bool]]:
        """The expressions inside that can be wrong on their own, and whether they decide which way to go."""
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            args = [] if name in ("sizeof", "snprintf") else node.args[:2] if name == "range" else node.args
            called = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return [(child, False) for child in [*called, *args, *(word.value for word in node.keywords)]]
        if isinstance(node, ast.IfExp):
            return [(node.body, False), (node.test, True), (node.orelse, False)]
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            return []
        if is_text(node):
            return [(node.left, False)]
        found = [(child, False) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        for loop in getattr(node, "generators", ()):
            found += [(loop.iter, False), *((test, True) for test in loop.ifs)]
        return found


def mutate(paths: Iterable[Path], package: str = "kvpool") -> tuple[dict[Path, str], list[Mutant]]:
    """Rewrite sources; nothing is written.

    Returns
    -------
    dict
        Path -> source; ``_mutant.pxd`` is new, beside the first.
    list of Mutant
        All of them, ``mutants[i].number == i + 1``.
    """
    texts = {path: path.read_text() for path in paths}
    schemata = Schemata({path.name: text for path, text in texts.items()})
    made = {path: schemata.file(path.name, text, package) for path, text in texts.items()}
    header = MUTANT_PXD.format(count=len(schemata.mutants) + 1)
    return made | {next(iter(texts)).with_name("_mutant.pxd"): header}, schemata.mutants
