"""Cython source, read with `ast`: its statements, its functions, and what its declarations say of types.

Casts, addresses, suffixes of integers and what stands in strings are covered by characters of the same length and
binding. So `ast` says where the parts of a statement are, and the rest is text.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CAST = re.compile(r"<(?:(?:const|unsigned|long) )*[A-Za-z_]\w*\s?\**\??>")
SIZE = re.compile(r"\b(sizeof\()([^()]*)\)")
SUFFIX = re.compile(r"\b(0[xX][0-9A-Fa-f]+|\d+)(ULL|LL|U|L)\b")
ADDRESS = re.compile(r'((?:^|[^\w\s)\]}"]|\b(?:return|else|if|and|or|in|not))\s*)&(?!=)')
QUOTED = re.compile(r'#[^\n]*|("""|"|\')((?:\\.|(?!\1).)*)\1', re.DOTALL)
HEAD = re.compile(r"(?:async )?(?:def|cdef|cpdef)\b.*?\b(\w+)\((.*)\)[^()]*:$", re.DOTALL)
CLASS = re.compile(r"(?:cdef )?class (\w+)(?:\((\w+)\))?")
NO_FUNCTION = re.compile(r"(?:cdef|ctypedef) (?:public |packed )*(?:class|struct|enum|extern|union)\b")
WORDS = re.compile(r"\b(?:const|inline|readonly|public|api|volatile|unsigned|signed|struct)\b")
INTEGERS = r"(?:u?int\d+_t|int|long|size_t|Py_ssize_t|bint)"
FUNCTION = re.compile(r"^\s*cp?def (?!class |struct |enum |extern )([^\n(=]*?)(\w+)\(", re.MULTILINE)
EXTERN = re.compile(r"^cdef extern from [^\n]*:\n((?:(?: +[^\n]*)?\n)*)", re.MULTILINE)
BLOCK = re.compile(r"(?:cdef|ctypedef) (?:packed )?(struct|enum|class)\b ?(\w+)?.*:$", re.DOTALL)


@cache
def core_sources() -> tuple[Path, ...]:
    """The sources of the core, as ``setup.py`` lists them; `memory` makes failures, and is none of it."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(ROOT / path for path in module.core_sources())


def uncommented(text: str) -> str:
    """`text` with comments and what is inside of quotes covered: a letter for each letter."""
    return QUOTED.sub(
        lambda found: found[1] + re.sub(r"[^\n]", "_", found[2]) + found[1] if found[1] else " " * len(found[0]), text
    )


def covered(text: str) -> str:
    """`text` as Python of the same length: a cast is a minus, an address a tilde, a comment spaces, a type a name."""
    text = SIZE.sub(lambda found: found[1] + "_" * len(found[2]) + ")", uncommented(text))
    text = CAST.sub(lambda found: "-" + " " * (len(found[0]) - 1), text)
    text = SUFFIX.sub(lambda found: found[1] + " " * len(found[2]), text)
    return ADDRESS.sub(lambda found: found[1] + "~", text)


@dataclass(frozen=True, slots=True)
class Line:
    """A logical line: several lines of the file where a bracket is open."""

    first: int  # place of its first character
    last: int  # behind its last, without a comment
    number: int  # of the line in the file
    indent: int


def logical_lines(text: str) -> Iterator[Line]:
    """All of them; docstrings, comments and empty lines left out."""
    plain, depth, first, at, begun = uncommented(text), 0, None, 0, 0
    for number, line in enumerate(plain.splitlines(keepends=True), 1):
        if line.strip() and first is None:
            first, begun = at + len(line) - len(line.lstrip()), number
        depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        at += len(line)
        if first is not None and depth == 0 and plain[first:at].count('"""') % 2 == 0:
            if not plain.startswith('"""', first):
                indent = first - (plain.rfind("\n", 0, first) + 1)
                yield Line(first, first + len(plain[first:at].rstrip()), begun, indent)
            first = None


@dataclass(slots=True)
class Function:
    file: str
    name: str
    owner: str  # its class, or ""
    nogil: bool
    parameters: list[tuple[str, str]]  # (type or "", name)
    body: list[Line] = field(default_factory=list)


def split_top(text: str, mark: str) -> list[tuple[int, int]]:
    """Spans of `text` between the characters `mark` that stand outside of brackets; '=' is assignment alone."""
    spans, depth, first = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        alone = mark != "=" or (text[i + 1 : i + 2] != "=" and text[i - 1] not in "=<>!+-*&|^/%")
        if c == mark and depth == 0 and alone:
            spans.append((first, i))
            first = i + 1
    return [*spans, (first, len(text))]


def typed(declaration: str) -> tuple[str, str]:
    """(type, name) of ``const Seq* q``; no type: ""."""
    words = WORDS.sub(" ", declaration.partition("=")[0]).replace("*", "* ").split()
    kind = "".join(words[:-1]).replace("notNone", "") or ("int" if "unsigned" in declaration else "")
    return kind, words[-1] if words else ""


def parameters_of(text: str) -> list[tuple[str, str]]:
    """What stands between the brackets of a head."""
    text = uncommented(text)
    return [typed(text[first:last]) for first, last in split_top(text, ",") if text[first:last].strip()]


def functions(file: str, text: str) -> list[Function]:
    """All functions and methods of one file."""
    found: list[Function] = []
    inside: list[tuple[int, str]] = []  # (indent, class)
    open_: Function | None = None
    edge = -1
    for line in logical_lines(text):
        if open_ is not None and line.indent > edge:
            open_.body.append(line)
            continue
        open_ = None
        inside = [one for one in inside if one[0] < line.indent]
        words = text[line.first : line.last]
        if made := CLASS.match(words):
            inside.append((line.indent, made[1]))
        elif not NO_FUNCTION.match(words) and (head := HEAD.match(uncommented(words))):
            owner, edge = inside[-1][1] if inside else "", line.indent
            parameters = parameters_of(words[head.start(2) : head.end(2)])
            open_ = Function(file, head[1], owner, "noexcept nogil" in words, parameters)
            found.append(open_)
    return found


@dataclass(slots=True)
class Declarations:
    """What the sources say of types."""

    fields: dict[str, dict[str, str]] = field(default_factory=dict)  # struct or class -> field -> type
    returns: dict[str, dict[str, str]] = field(default_factory=dict)  # function -> module -> type
    takes: dict[str, list[list[str]]] = field(default_factory=dict)  # function -> types, of each that has the name
    constants: set[str] = field(default_factory=set)  # integers that have a name
    nullable: set[str] = field(default_factory=set)  # functions of which some return NULL
    classes: set[str] = field(default_factory=set)

    def another(self, kind: str, name: str) -> str:
        """The next field of the same type, "" if it is the only one; C takes no array for a value."""
        kinds = self.fields.get(kind, {})
        same = [other for other in kinds if kinds[other] == kinds.get(name) and "[" not in kinds[other]]
        return same[(same.index(name) + 1) % len(same)] if len(same) > 1 else ""


def declarations(texts: dict[str, str]) -> Declarations:
    """Read the declarations of all files, by their names."""
    made = Declarations()
    for file, text in texts.items():
        module = file.partition(".")[0]
        _read_blocks(text, made)
        for block in EXTERN.finditer(text):
            for found in re.finditer(r"^ +(?:const )?(\w+[ *]+)(\w+)(?: \"\w+\")?\(", block[1], re.MULTILINE):
                made.returns.setdefault(found[2], {})[module] = typed(found[1] + "x")[0]
        for found in FUNCTION.finditer(text):
            parameters = parameters_of(text[found.end() : text.index(")", found.end())])
            made.returns.setdefault(found[2], {})[module] = typed(found[1] + " x")[0]
            made.takes.setdefault(found[2], []).append([kind for kind, name in parameters if name != "self"])
        made.constants.update(re.findall(rf"^cdef (?:const )?{INTEGERS} ([A-Z][A-Z0-9_]*)\b", text, re.MULTILINE))
        made.constants.update(re.findall(r"\bU?INT\d+_M(?:AX|IN)\b", text))
        for function in functions(file, text):
            if any(text[line.first : line.last] == "return NULL" for line in function.body):
                made.nullable.add(function.name)
    return made


def _read_blocks(text: str, made: Declarations) -> None:
    """Structures, classes and enumerations."""
    inside, outer, inner = "", 0, -1
    for line in logical_lines(text):
        words = uncommented(text[line.first : line.last])
        if inside and line.indent <= outer:
            inside = ""
        if inside and inner < 0:
            inner = line.indent
        if found := BLOCK.match(words):
            inside, outer, inner = found[2] if found[1] != "enum" else "enum", line.indent, -1
            if found[1] == "class":
                made.classes.add(inside)
            if inside != "enum":
                made.fields.setdefault(inside, {})
        elif inside == "enum":
            made.constants.update(re.findall(r"(?:^|, *)([A-Z]\w*)", words))
        elif inside and line.indent == inner and re.match(r"(?:cdef )?[\w \[\]]+[ *]+\w+(?:, ?\**\w+)*$", words):
            first, *others = [words[a:b].strip() for a, b in split_top(words, ",")]
            kind, name = typed(first.removeprefix("cdef "))
            kind = "const " * first.removeprefix("cdef ").startswith("const ") + kind
            made.fields[inside].update({one: kind for one in (name, *others) if not one.startswith("__")})
