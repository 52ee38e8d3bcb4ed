"""`make cross`: what it compiles for other machines, and that it finds what a Mac's compiler would refuse."""

import metal_costs
import msl.build
import pytest

from kvpool_backends.mlx import metal_kernels
from tests.verify.builds import cross

pytest.importorskip("ziglang", reason="make cross installs it")
RUNTIME = msl.build.RUNTIME / "scheduler.cpp"
OPTIONS = ("-std=c++20", "-O2", f"-I{msl.build.INCLUDE}", f"-I{msl.build.RUNTIME}")


@pytest.mark.parametrize("target", [cross.MACOS, cross.LINUX])
@pytest.mark.parametrize(
    ("fault", "refused"),
    [("", ()), ("#include <ucontext.h>", (cross.MACOS,)), ("int x = y;", (cross.MACOS, cross.LINUX))],
)
def test_what_another_compiler_refuses_is_found(tmp_path, monkeypatch, target, fault, refused):
    monkeypatch.setattr(cross, "FOLDER", tmp_path)
    source = tmp_path / "scheduler.cpp"
    source.write_text(f"{fault}\n{RUNTIME.read_text()}")
    wrong = cross.compile_piece(target, cross.Piece("piece", (source,), (*OPTIONS, "-Wl,-undefined,dynamic_lookup")))
    assert bool([text for text in wrong if "scheduler.cpp:" in text and "error" in text]) is (target in refused)


def test_every_module_of_the_wheel_is_compiled():
    names = {piece.name for piece in cross.extension_modules()}
    assert names == {"kvpool/_core", "kvpool/capi", "kvpool_backends/cpu/_kernels"}
    assert all(source.exists() for piece in cross.extension_modules() for source in piece.sources)
    (kernels,) = (piece for piece in cross.extension_modules() if piece.name.endswith("_kernels"))
    assert {"isa_neon.c", "isa_portable.c"} <= {source.name for source in kernels.sources}


@pytest.mark.parametrize(("planted", "is_refused"), [("thread R& rows", False), ("device R& rows", True)])
def test_planted_fault_in_address_spaces_of_a_kernel_is_found(monkeypatch, planted, is_refused):
    real = metal_kernels._file_text
    monkeypatch.setattr(metal_kernels, "_file_text", lambda name: real(name).replace("thread R& rows", planted))
    metal_kernels.source_text.cache_clear()
    wrong = cross.refused_kernels(metal_costs.VARIANTS[:1])
    metal_kernels.source_text.cache_clear()
    assert any(": no matching function for call to 'load'" in text and "OpenCL" in text for text in wrong) is is_refused
    assert is_refused or not wrong
