"""How large and how entangled the tree is: ``python -m benchmarks.house [CHECKOUT]``.

The wheel and what is in it, lines, public names, imports that go round in circles or up, and places that say the same
thing twice. Nothing here runs the code that it counts, but for the build of the wheel.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

PACKAGES = ("kvpool", "kvpool_backends")
PARTS = {"product": (*PACKAGES, "metal"), "tests": ("tests",)}
SOURCE = (".py", ".pyx", ".pxd", ".pxi", ".pyi", ".h", ".c", ".cpp", ".metal")
#: A module may import from its own layer and from those before it.
LAYERS = (
    (
        *("kvpool.errors", "kvpool.stats", "kvpool.groups", "kvpool.spec", "kvpool.namespaces"),
        "kvpool.retention",
        "kvpool._arguments",
    ),
    ("kvpool._", "kvpool.capi"),
    ("kvpool.scheduler", "kvpool.protocol", "kvpool"),
    ("kvpool_backends",),
    ("kvpool.adapters", "kvpool.store"),
    ("kvpool.serving",),
    ("kvpool.testing",),
    ("kvpool.cli", "kvpool.__main__"),
)
NAMES = "import kvpool as k; print(*(sum(n[0] != '_' for n in d) for d in (k.__all__, dir(k.Pool), dir(k.Plan))))"
LEAST_LINES = 6  # that two places have in common
MOST_PLACES = 8  # a run that stands in more is how such files look

# ---------------------------------------------------------------------- files


def tracked(root: Path) -> list[Path]:
    """Files that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for path in map(Path, listed.splitlines()) if (root / path).is_file()]


def text_of(path: Path) -> str:
    """A file's text; empty if it is none."""
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode(errors="replace")


def count_lines(root: Path, paths: list[Path]) -> int:
    """Lines of these files."""
    return sum(text_of(root / path).count("\n") for path in paths)


def count_statements(root: Path, paths: list[Path]) -> int:
    """Return the number of statements in the Python files among `paths`."""
    trees = (ast.parse(text_of(root / path)) for path in paths if path.suffix == ".py")
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def wheel(root: Path) -> dict[str, float]:
    """What the wheel holds."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")  # a build in place would take along what earlier ones left behind
        for path in tracked(root):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, tree / path)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(tree)]
        subprocess.run(command, check=True, capture_output=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            files = archive.infolist()
            sources = [archive.read(file).count(b"\n") for file in files if file.filename.endswith(SOURCE)]
    return {
        "wheel: files": len(files),
        "wheel: extensions": sum(file.filename.endswith((".so", ".pyd")) for file in files),
        "wheel: unpacked MB": round(sum(file.file_size for file in files) / 1e6, 2),
        "wheel: lines of source": sum(sources),
    }


# -------------------------------------------------------------------- imports


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    parts = [*path.parent.parts, path.stem]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_python(
    text: str, module: str, is_package: bool, left_out: Callable[[ast.AST], bool] = lambda node: False
) -> Iterator[tuple[str, str]]:
    """(module, name) of all imports, also of those in functions and for types alone, unless they are `left_out`."""
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in ast.iter_child_nodes(node) if not left_out(child)]
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            yield from ((base, alias.name) for alias in node.names)


def imports_of_cython(text: str) -> Iterator[tuple[str, str]]:
    """The same of a Cython file."""
    for base, group, names in re.findall(r"^\s*from ([\w.]+) c?import (?:\(([^)]*)\)|(.*))", text, re.MULTILINE):
        for name in re.sub(r"#.*", "", group or names).replace("\n", " ").split(","):
            if name.strip():
                yield base, name.split()[0]
    for names in re.findall(r"^\s*c?import (.*)", text, re.MULTILINE):
        yield from ((name.split()[0], "") for name in re.sub(r"#.*", "", names).split(",") if name.strip())


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports. A name that a package only hands on leads to where it comes from."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in tracked(root):
        if path.parts[0] not in PACKAGES or path.suffix not in (".py", ".pyx", ".pxd", ".pxi"):
            continue
        module, text = module_of(path), text_of(root / path)
        if path.suffix == ".py":
            found[module] |= set(imports_of_python(text, module, path.stem == "__init__"))
        else:
            found[module] |= set(imports_of_cython(text))
    passed_on = {module: dict((name, base) for base, name in imports if name) for module, imports in found.items()}

    def target(base: str, name: str) -> str:
        while f"{base}.{name}" not in found and base in found and passed_on[base].get(name, base) != base:
            base = passed_on[base][name]
        return f"{base}.{name}" if f"{base}.{name}" in found else base

    return {
        module: {end for base, name in imports if (end := target(base, name)) in found and end != module}
        for module, imports in found.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports, by way of others, all of its group."""
    reach: dict[str, set[str]] = {}
    for module in graph:
        seen, todo = set(), [module]
        while todo:
            for end in graph[todo.pop()] - seen:
                seen.add(end)
                todo.append(end)
        reach[module] = seen
    groups = {frozenset(end for end in reach[m] if m in reach[end]) for m in graph if m in reach[m]}
    return sorted(sorted(group) for group in groups)


def layer_of(module: str) -> int:
    """Where a module stands, by the longest name that fits; what nobody placed stands on top."""
    best, found = -1, len(LAYERS)
    for number, names in enumerate(LAYERS):
        for name in names:
            fits = module == name or module.startswith(name if name.endswith("_") else name + ".")
            if fits and len(name) > best:
                best, found = len(name), number
    return found


def arrows_up(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of a module in a layer above."""
    return sorted((a, b) for a, ends in graph.items() for b in ends if layer_of(b) > layer_of(a))


# ----------------------------------------------------------------- duplicates

WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\"[^\"]*\"|'[^']*'|\S")
KEYWORDS = frozenset(
    [
        *("and", "as", "assert", "break", "case", "cdef", "class", "const", "continue", "cpdef", "def", "del", "do"),
        *("elif", "else", "except", "finally", "for", "from", "if", "import", "in", "is", "lambda", "nogil", "not"),
        *("or", "pass", "raise", "return", "self", "static", "struct", "switch", "try", "while", "with", "yield"),
    ]
)
KINDS = {"name": "n", "value": "0"}
SILENT = ("import ", "from ", "cimport ", '"', "*", "/*", "@")


def kind_of(word: str) -> str:
    """What a word stands for."""
    return "name" if word[0].isalpha() or word[0] == "_" else "value" if word[0] in "\"'0123456789" else ""


def shape(line: str) -> str:
    """A line without its names, strings and numbers; empty for a comment, a bracket, an import: they say nothing."""
    line = line.split("//" if "//" in line else "#")[0].strip()
    if line.startswith(SILENT) or not re.search(r"\w", line):
        return ""
    return " ".join(word if word in KEYWORDS else KINDS.get(kind_of(word), word) for word in WORD.findall(line))


def alike(root: Path) -> set[tuple[str, str]]:
    """Pairs of files, or a file and itself, that share so many lines in a row, alike but for names."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path in tracked(root):
        if path.suffix not in SOURCE:
            continue
        shapes = [found for line in text_of(root / path).splitlines() if (found := shape(line))]
        for k in range(len(shapes) - LEAST_LINES + 1):
            run = tuple(shapes[k : k + LEAST_LINES])
            if sum(len(line) > 12 for line in run) > LEAST_LINES // 2:
                places[run].append((str(path), k))
    return {
        (a, b)
        for found in places.values()
        if 1 < len(found) <= MOST_PLACES
        for (a, i), (b, k) in combinations(found, 2)
        if a != b or k - i >= LEAST_LINES
    }


# ---------------------------------------------------------------------- texts


def long_lines(text: str) -> int:
    """Lines over 100 columns of a text in Markdown, tables and code apart."""
    is_code, found = False, 0
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        found += len(line) > 100 and not is_code and not line.startswith("|")
    return found


def measure(root: Path) -> dict[str, object]:
    """All figures of a checkout; public names are those of its own build."""
    paths, graph = tracked(root), import_graph(root)
    parts = {name: [path for path in paths if path.parts[0] in folders] for name, folders in PARTS.items()}
    told = subprocess.run([sys.executable, "-c", NAMES], cwd=root, capture_output=True, text=True, check=True).stdout
    return {
        **wheel(root),
        "git: lines": count_lines(root, paths),
        **{f"{name}: lines": count_lines(root, part) for name, part in parts.items()},
        **{f"{name}: statements in Python": count_statements(root, part) for name, part in parts.items()},
        "names: kvpool / Pool / Plan": " / ".join(told.split()),
        "import circles": len(circles(graph)),
        "imports of a layer above": len(arrows_up(graph)),
        "pairs of files that share six lines": len(alike(root)),
        "README: lines": count_lines(root, [Path("README.md")]),
        "docs: lines over 100 columns": sum(long_lines(text_of(root / p)) for p in paths if p.suffix == ".md"),
    }


def checkout(text: str) -> Path:
    """Return the folder that an argument names, which has to be a checkout."""
    if not Path(text, ".git").exists():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of a git repository")
    return Path(text).resolve()


if __name__ == "__main__":
    about = "How large and how entangled the tree is."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=about)
    where = "folder of a git repository (default: the current one)"
    parser.add_argument("root", metavar="CHECKOUT", type=checkout, nargs="?", default=".", help=where)
    ROOT = parser.parse_args().root
    for key, value in measure(ROOT).items():
        print(f"{key:<40} {value}")
    for found in circles(import_graph(ROOT)):
        print("circle:", *found)
    for start, end in arrows_up(import_graph(ROOT)):
        print("up:", start, "->", end)
