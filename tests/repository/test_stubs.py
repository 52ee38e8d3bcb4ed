"""The stubs say what the built modules are: names, parameters, defaults, in both directions."""

import os
import subprocess
import sys
from pathlib import Path

import kvpool

PACKAGE = Path(kvpool.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.pyi"))
BACKEND_MODULES = ["kvpool_backends.cpu._kernels"]
# What Cython puts into modules and classes beside what their sources define, and what `inspect` reads.
MADE_BY_CYTHON = r".*\.__(test__|signature__|pyx_capi__|reduce_cython__|setstate_cython__)"


def test_every_public_class_has_a_stub():
    defined_in = {type_.__module__ for type_ in (*kvpool.Pool.__mro__, *kvpool.Plan.__mro__)} - {"builtins"}
    assert defined_in | {"kvpool.capi"} == {f"kvpool.{module}" for module in MODULES}


def test_stubs_agree_with_the_built_modules(tmp_path):
    allowlist = tmp_path / "allowlist"
    allowlist.write_text(MADE_BY_CYTHON + "\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--ignore-unused-allowlist"]
    result = subprocess.run(
        [*command, "--allowlist", str(allowlist), *(f"kvpool.{module}" for module in MODULES), *BACKEND_MODULES],
        cwd=PACKAGE.parent,
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
