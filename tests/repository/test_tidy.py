"""Rules of the repository that no linter checks: sizes, unfinished work, and who may import whom."""

import ast
import re
from pathlib import Path

from benchmarks import house
from tests.conftest import BEGIN_FIRST
from tests.verify.mutants.source import uncommented

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 1500
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 120
FOLDERS = ("kvpool", "kvpool_backends", "metal", "benchmarks", "examples", "tests", "docs", ".ci")
SUFFIXES = (".py", ".pyx", ".pxd", ".pxi", ".pyi", ".c", ".h", ".metal", ".rs", ".sh")
# Spelled in halves, so that the list does not find itself.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
#: Words of law and theatre, where the field has words of its own, in what users read.
THEATRE = re.compile(r"\b(convict\w*|hunt\w*|hostile|rude\w*|books|g[ai]ve[ns]? up|giving up)\b", re.IGNORECASE)
READ_BY_USERS = ("kvpool", "kvpool_backends", "metal", "docs", "examples", "benchmarks")
# A part of the core may use those before it, never those after it; a class may be declared before its methods.
CORE_ORDER = (
    *("types", "memory", "lock", "sha256", "args"),  # C functions on structs
    *("blocks", "names", "sequence", "events", "prefix", "groups", "wire", "step", "audit"),
    *("prefix_tree", "retention", "checkpoints", "prefix_rows"),
    *("refuse", "state", "block_calls", "sequence_calls", "plan"),  # calls of a pool, in C, and classes for Python
    *("prefix_calls", "step_calls", "evict_calls", "resize", "keys", "pool"),
)
CORE_INCLUDE = re.compile(r'^include "core/(\w+)\.\w+"$', re.MULTILINE)
CORE_NAME = re.compile(
    r"^(?:def|cdef|ctypedef)\b(?! extern| enum)[^\n=(:]*?(\w+) *(?:[(=:#]|$)|^    ([A-Z][A-Z0-9_]+) *(?:[=#]|$)",
    re.MULTILINE,
)
# Folders whose code drives a framework; elsewhere kvpool knows none.
FRAMEWORK_USERS = (
    *("kvpool/adapters/", "kvpool/serving/", "kvpool_backends/mlx/"),
    *("kvpool/cli/wired.py", "benchmarks/metal.py", "benchmarks/serving_lm.py"),
    "benchmarks/quality.py",
    *("kvpool/cli/demo.py", "kvpool/cli/doctor.py", "benchmarks/tiny_families.py"),
)
FRAMEWORKS = ("mlx", "mlx_lm", "torch", "jax", "transformers")
CYTHON_FUNCTION = re.compile(r"(?!\s*c?p?def\s+(?:extern|enum|struct|class|packed))\s*(?:def|cdef|cpdef)\b.*?\b(\w+)\(")


def sources(*suffixes):
    """Return the project's own files with one of these suffixes."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return sorted(path for path in files if path.suffix in suffixes and "__pycache__" not in path.parts)


def relative(path):
    return str(path.relative_to(ROOT))


def imports_of(path, *, inside_functions):
    """Return the dotted names that a file imports, in Python those under TYPE_CHECKING left out."""

    def left_out(node):
        is_inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions
        return is_inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))

    text, module = path.read_text(), house.module_of(path.relative_to(ROOT))
    if path.suffix == ".py":
        found = house.imports_of_python(text, module, path.stem == "__init__", left_out)
    else:
        found = house.imports_of_cython(text)
    return [f"{base}.{name}" if name else base for base, name in found]


def belongs(imported, package):
    return imported == package or imported.startswith(package + ".")


def cython_functions(text):
    """Return (name, lines) of every function in Cython source: its head and what is indented deeper."""
    lines, functions = text.splitlines(), []
    for start, line in enumerate(lines):
        match = CYTHON_FUNCTION.match(line)
        if not match:
            continue
        indent = len(line) - len(line.lstrip())
        last, in_head = start, not line.rstrip().endswith(":")
        for number, other in enumerate(lines[start + 1 :], start + 1):
            if not other.strip():
                continue
            if not in_head and len(other) - len(other.lstrip()) <= indent:
                break
            in_head = in_head and not other.rstrip().endswith(":")
            last = number
        functions.append((match[1], last - start + 1))
    return functions


def python_functions(text):
    """Return (name, lines) of every function in Python source."""
    return [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_short():
    counts = {relative(path): len(path.read_text().splitlines()) for path in sources(*SUFFIXES)}
    assert not {path: lines for path, lines in counts.items() if lines > FILE_LINES_MAX}


def test_functions_are_short():
    found = []
    for path in sources(".py", ".pyx", ".pxi"):
        read = python_functions if path.suffix == ".py" else cython_functions
        for function, lines in read(path.read_text()):
            if lines > FUNCTION_LINES_MAX:
                found.append(f"{relative(path)}: {function} has {lines} lines")
    assert not found


def test_lines_are_short_and_clean_and_nothing_is_left_unfinished():
    found = []
    for path in [*sources(*SUFFIXES, ".md"), ROOT / "Makefile"]:
        is_code = path.suffix in SUFFIXES
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_long = len(line) > LINE_LENGTH_MAX and "://" not in line
            if UNFINISHED.search(line) or (is_code and ("\t" in line or line != line.rstrip() or is_long)):
                found.append(f"{relative(path)}:{number}: {line!r}")
    assert not found


def test_texts_for_users_have_the_words_of_the_field():
    found = []
    for path in [*sources(*SUFFIXES, ".md"), ROOT / "Makefile"]:
        if path.parent != ROOT and not relative(path).startswith(READ_BY_USERS):
            continue
        found += [f"{relative(path)}: {match[0]}" for match in THEATRE.finditer(path.read_text())]
    assert not found


def core_parts():
    """Return the text of each part of the core, its comments and strings covered, in order."""
    files = {path: path.read_text() for path in sorted((ROOT / "kvpool" / "core").iterdir())}
    return {part: uncommented("\n".join(files[path] for path in files if path.stem == part)) for part in CORE_ORDER}


def core_names(text):
    """Return the names that a part of the core defines for others: functions, types, constants."""
    return {name or constant for name, constant in CORE_NAME.findall(text)}


def used_too_early(parts):
    """Return (part, name) where a part of the core uses a name of a later one; a function is used if it is called."""
    found, known = [], set()
    everywhere = set().union(*map(core_names, parts.values()))
    for part, text in parts.items():
        used = set(re.findall(r"(?<![.\w])(?:[A-Z]\w*|[a-z]\w*(?=\())", text))
        known |= core_names(text)
        own = {name for name, _ in cython_functions(text)}  # methods too
        found += [(part, name) for name in sorted(used & everywhere - known - own)]
    return found


def test_core_is_included_in_order():
    for suffix, module in ((".pxd", "_core.pxd"), (".pxi", "_core.pyx")):
        there = {path.stem for path in (ROOT / "kvpool" / "core").iterdir() if path.suffix == suffix}
        included = CORE_INCLUDE.findall((ROOT / "kvpool" / module).read_text())
        assert included == [part for part in CORE_ORDER if part in there]
        assert there == set(included), "CORE_ORDER has to name every part of the core"


def test_core_parts_use_those_before_them():
    assert used_too_early(core_parts()) == []


def test_core_needs_no_numpy_headers():
    text = "\n".join(path.read_text() for path in sources(".pyx", ".pxd", ".pxi"))
    assert not re.search(r"cimport\s+numpy|from\s+numpy\s+cimport|numpy/arrayobject", text)


def test_extensions_of_the_wheel_have_no_typed_memoryviews():
    """One typed memoryview adds 90 KB of Cython's own code to an extension."""
    view = re.compile(r"^\s*(?:cp?)?def\s.*\w\[:[:\d]*[\],]", re.MULTILINE)
    assert view.search("    cdef int64_t[::1] found") and view.search("def f(const int[:, :] x):")
    files = [path for path in sources(".pyx", ".pxd", ".pxi") if relative(path).startswith("kvpool")]
    assert files and [relative(path) for path in files if view.search(path.read_text())] == []


def test_kvpool_imports_no_backend_and_no_adapter():
    """Nothing in kvpool imports a backend when it is imported itself, nor an adapter from outside of adapters."""
    found = []
    for path in sources(".py", ".pyx", ".pxd", ".pxi"):
        if not relative(path).startswith("kvpool/"):
            continue
        imports = imports_of(path, inside_functions=False)
        forbidden = ["kvpool_backends"]
        if not relative(path).startswith(FRAMEWORK_USERS):
            forbidden += ["kvpool.adapters"]
        found += [f"{relative(path)} imports {i}" for i in imports if any(belongs(i, f) for f in forbidden)]
    assert not found


def test_backends_import_the_protocol_and_no_more():
    """Of kvpool: what a backend is, what is stored, the errors."""
    allowed = ("kvpool.protocol", "kvpool.spec", "kvpool.errors")
    found = []
    for path in sources(".py"):
        if relative(path).startswith("kvpool_backends/"):
            imports = [i for i in imports_of(path, inside_functions=True) if belongs(i, "kvpool")]
            found += [f"{relative(path)} imports {i}" for i in imports if not any(belongs(i, a) for a in allowed)]
    assert not found


def test_frameworks_are_imported_where_they_are_used_only():
    """Inside of functions neither."""
    found = []
    for path in sources(".py"):
        if not relative(path).startswith(("kvpool/", "kvpool_backends/")) or relative(path).startswith(FRAMEWORK_USERS):
            continue
        imports = imports_of(path, inside_functions=True)
        found += [f"{relative(path)} imports {i}" for i in imports if any(belongs(i, f) for f in FRAMEWORKS)]
    assert not found


def test_long_files_are_there():
    """What conftest.py has begin first, by name: a file that was renamed would begin last."""
    assert [name for name in BEGIN_FIRST if not [*(ROOT / "tests").rglob(f"test_{name}.py")]] == []
