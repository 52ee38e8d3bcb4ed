"""kvpool.h may grow and must not change: signatures, numbers and layout are those of a snapshot, as far as it goes.

The snapshot, tests/data/capi_abi.json, is of the header as it was released. What is added at the end of the table of
functions, to the statistics or to the numbers is added to the snapshot too: ``python tests/capi/test_capi_abi.py``.
"""

import json
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from capi_table import HEADER, constants, member_name, members

SNAPSHOT = Path(__file__).parents[1] / "data" / "capi_abi.json"
STRUCTS = ("kvpool_api", "kvpool_stats", "kvpool_array", "kvpool_keep")
FIXED = ("kvpool_array", "kvpool_keep")  # nobody says how large theirs is: they cannot grow
TEXT = HEADER.read_text()
CC = shlex.split(sysconfig.get_config_var("CC") or "cc")
CXX = shlex.split(sysconfig.get_config_var("CXX") or "c++")
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]


def described(text, folder):
    """Return what a caller's machine code depends on: text and numbers, as a compiler sees them."""
    lines = [
        f'printf("{name}.{member} %zu %zu\\n", offsetof({name}, {member}), sizeof((({name} *)0)->{member}));'
        for name in STRUCTS
        for member in map(member_name, members(text, name))
    ]
    (folder / "kvpool.h").write_text(text)
    (folder / "layout.c").write_text(
        '#include <stdio.h>\n#include "kvpool.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run([*CC, "-std=c99", *STRICT, "layout.c", "-o", "layout"], cwd=folder, check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout
    return {
        "structs": {name: members(text, name) for name in STRUCTS},
        "constants": constants(text),
        "layout": {line.split()[0]: list(map(int, line.split()[1:])) for line in printed.splitlines()},
    }


def changes(old, new):
    """Return what a caller that was compiled with `old` would stumble over in `new`."""
    found = [f"{k} is {new['constants'].get(k)}" for k, v in old["constants"].items() if new["constants"].get(k) != v]
    found += [f"{k} is at {new['layout'].get(k)}" for k, v in old["layout"].items() if new["layout"].get(k) != v]
    for name, was in old["structs"].items():
        now = new["structs"][name]
        found += [f"{name}: {a} became {b}" for a, b in zip(was, now, strict=False) if a != b]
        if len(now) < len(was) or (name in FIXED and len(now) != len(was)):
            found.append(f"{name} has {len(now)} members instead of {len(was)}")
    return found


@pytest.fixture(scope="module")
def snapshot():
    return json.loads(SNAPSHOT.read_text())


def test_header_is_as_it_was_released(snapshot, tmp_path):
    now = described(TEXT, tmp_path)
    assert not changes(snapshot, now)
    assert now == snapshot, "something was added: python tests/capi/test_capi_abi.py"


@pytest.mark.long
@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("int (*num_free)(kvpool_pool *pool, int64_t *blocks);", ""),
        ("int (*open)(kvpool_pool *pool, int64_t tokens,", "int (*open)(kvpool_pool *pool, int32_t tokens,"),
        ("KVPOOL_STALE_HANDLE = 3", "KVPOOL_STALE_HANDLE = 14"),
        ("int32_t itemsize;", "int32_t itemsize;\n    int32_t added;"),
        ("uint32_t struct_size;", "uint64_t struct_size;"),
    ],
)
def test_change_is_seen(snapshot, tmp_path, was, now):
    assert TEXT.count(was) == 1
    assert changes(snapshot, described(TEXT.replace(was, now), tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("} kvpool_api;", "    int (*added)(kvpool_pool *pool);\n} kvpool_api;"),
        ("} kvpool_stats;", "    int64_t added;\n} kvpool_stats;"),
        ("KVPOOL_STATE_DST = 15\n", "KVPOOL_STATE_DST = 15,\n    KVPOOL_ADDED = 16\n"),
    ],
)
def test_addition_is_allowed(snapshot, tmp_path, was, now):
    assert TEXT.count(was) == 1
    new = described(TEXT.replace(was, now), tmp_path)
    assert new != snapshot and not changes(snapshot, new)


@pytest.mark.parametrize("python", [False, True], ids=["plain", "with Python.h"])
@pytest.mark.parametrize("compiler", [[*CC, "-std=c99"], [*CXX, "-std=c++11"]], ids=["C99", "C++11"])
def test_header_compiles_without_a_warning(tmp_path, compiler, python):
    source = tmp_path / ("use.cpp" if "c++11" in compiler[-1] else "use.c")
    source.write_text(
        ("#include <Python.h>\n" if python else "")
        + "#include <kvpool/include/kvpool.h>\n#include <kvpool/include/kvpool.h>\n"
        + ("const void *use(void);\nconst void *use(void) { return kvpool_import(); }\n" if python else "")
        + "int f(const kvpool_api *a, kvpool_pool *p);\nint f(const kvpool_api *a, kvpool_pool *p)\n"
        + "{ int64_t n; return a->open(p, 0, &n) == KVPOOL_OK; }\n"
    )
    system = ["-isystem", sysconfig.get_path("include")]  # its header is not ours to judge
    command = [*compiler, *STRICT, "-I", str(HEADER.parent.parent.parent)]
    done = subprocess.run([*command, *system, "-c", source, "-o", tmp_path / "use.o"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        SNAPSHOT.write_text(json.dumps(described(TEXT, Path(temporary)), indent=1) + "\n")
    sys.exit(0)
