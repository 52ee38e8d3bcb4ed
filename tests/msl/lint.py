"""Asks clang whether a kernel keeps Metal's address spaces apart: what Apple's compiler refuses and g++ does not see.

Clang checks two dialects of it, and compiles neither to code. With ``device``, ``constant`` and ``threadgroup`` spelled
as attributes of C++17, it refuses a threadgroup pointer where a device pointer is expected, and a pointer without an
address space. As C++ for OpenCL, whose address spaces are part of the language, it refuses also C-style casts that mix
them, and member functions of objects that are not the thread's. It is no Metal compiler: a comparison of vectors gives
integers, not bools.
"""

import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .prepass import (
    rewrite_threadgroup_variables,
    skip_template_arguments,
    strip_attributes,
    strip_comments,
)

HEADER = Path(__file__).resolve().parent / "lint" / "metal.h"
FLAGS = (
    "-fsyntax-only", "-ferror-limit=20", "-Wall", "-Wextra", "-Wdouble-promotion", "-Wno-unknown-pragmas",
    "-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-unused-parameter", "-Wno-unused-variable",
    "-Wno-unused-function", "-Wno-sign-compare",
)  # fmt: skip
DIALECTS = {
    "C++": ("-x", "c++", "-std=c++17", "-nostdinc"),
    "OpenCL": ("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-Xclang", "-fnative-half-type"),
}
_VECTOR_NAME = re.compile(
    r"(?<![\w:])((?:uchar|u?int|u?long|ushort|half|bfloat|float)[234])\s*(?=\()"
    r"|\b(?:metal::)?vec\s*<"
)
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<[^\n]*", re.MULTILINE)
# Metal converts vectors in functional casts, and half to float unasked; nothing may become double.
_DIAGNOSTIC = re.compile(
    r": (?:fatal )?error: (?! ?from vector '.* to vector '.* of different size)"
    # In C++ for OpenCL, a temporary object lies in no address space.
    r"(?!cannot initialize object parameter .* type '(?!.*__(?:global|local|constant|private|generic) ))"
    r"|: warning: (?!.* to '(?!double').*\[-Wdouble-promotion\])"
)
_STRUCT = re.compile(r"^struct [^;{]*\{\n.*?^\};", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r"^(\s*METAL_FUNC [^;{]*\))( const)? \{", re.MULTILINE)
# What C++ has and Metal has not.
BANNED = {
    "double": "no type double",
    "goto": "no goto",
    "new": "no new",
    "delete": "no delete",
    "virtual": "no virtual functions",
    "throw": "no exceptions",
    "try": "no exceptions",
    "dynamic_cast": "no dynamic_cast",
    "typeid": "no typeid",
    "thread_local": "no thread_local",
    "std": "no std::",
} | dict.fromkeys(("kernel", "vertex", "fragment"), "these names are qualifiers of functions")


@cache
def clang() -> tuple[str, ...] | None:
    """The command of the newest clang++ on the path, or of that in zig's package from PyPI, or None."""
    versions = [f"clang++-{version}" for version in range(24, 15, -1)]
    for name in (*versions, "clang++"):
        if found := shutil.which(name):
            return (found,)
    return (sys.executable, "-m", "ziglang", "clang") if find_spec("ziglang") else None


def _constructors(text: str) -> str:
    """Write ``lint_vector<V>(...)`` for ``V(...)``, V a vector type."""
    done, at = [], 0
    for match in _VECTOR_NAME.finditer(text):
        if match.start() < at:
            continue
        end = match.end() if match.group(1) else skip_template_arguments(text, match.end())
        if not text[end:].lstrip().startswith("("):
            continue
        kind = match.group(1) or text[match.start() : end]
        done += [text[at : match.start()], f"lint_vector<{kind}>"]
        at = end
    return "".join([*done, text[at:]])


def lint(source: str, name: str) -> list[str]:
    """Return what clang, and a list of what Metal has not, say against a text; nothing if all is well.

    `source` is Metal text that names what it needs instantiated, as MLX's generated text does in its last line.
    """
    text = _constructors(_SYSTEM_INCLUDE.sub("", strip_attributes(strip_comments(source))))
    text = rewrite_threadgroup_variables(text, name, "threadgroup {0} (&{1}){2} = *(threadgroup {0} (*){2})8".format)
    found = [
        f"{name}: {BANNED[word]}"
        for word in sorted(set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"\n]*"', "", text))) & BANNED.keys())
    ]
    prefix = f'#line 1 "{name}"\nusing namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n'
    for dialect, options in DIALECTS.items() if clang() else ():
        if dialect == "OpenCL":  # whose member functions are of objects anywhere, Metal's of those of a thread
            text = _STRUCT.sub(lambda found: _MEMBER.sub(r"\1\2 thread {", found[0]), text)
        result = subprocess.run(
            [*clang(), *options, *FLAGS, "-include", str(HEADER), "-"],
            input=f'{prefix}#line 1 "{name}"\n{text}', capture_output=True, text=True, check=False,
        )  # fmt: skip
        found += [f"{line} ({dialect})" for line in result.stderr.splitlines() if _DIAGNOSTIC.search(line)]
    return found
