"""What a user gets: sdist and wheel are complete, the wheel works alone, and other extensions can cimport kvpool.

The sdist is built from a copy of the sources, the wheel from the sdist, both without network. The wheel is
then installed into an environment that has nothing but numpy. It is compiled without optimization, which takes half as
long and changes neither what is in it nor what it computes; the size that counts is that with the extensions of the
build in place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import kvpool

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"jax", "kvpool_backends", "matplotlib", "mlx", "mlx_lm", "rich", "torch", "transformers"}
WHEEL_BYTES_MAX = 1_700_000
NOT_SOURCES = shutil.ignore_patterns(
    "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.png", ".git", ".venv", ".*_cache",
    ".hypothesis", ".benchmarks",
)  # fmt: skip
USE = """
    import kvpool, kvpool.protocol, kvpool_backends, numpy
    pool = kvpool.Pool(64, 4)
    plan = kvpool.Plan(pool, 2, 16)
    handle = pool.open()
    pool.step(plan, [handle], 9)
    assert plan.seq_lens.tolist() == [9] and plan.slot_mapping[8] == 12
    pool.done(plan)
    pool.close([handle])
    pool.check()
    spec, ones = kvpool.KVSpec(1, 1, 4, "float32", 2), numpy.ones((1, 1, 4), numpy.float32)
    backend = kvpool_backends.load_backend("cpu")(spec, 3)
    arrays = ([[1]], [1], [0, 1], [2])
    step = backend.prepare(kvpool.protocol.StepArrays(*map(numpy.array, arrays)))
    backend.write(step, 0, ones, 3 * ones)
    assert backend.attend(step, 0, ones).tolist() == [[[3.0, 3.0, 3.0, 3.0]]]
    print(kvpool.__file__)
"""


def run(*command, cwd, **environment):
    """Run a command without the paths of this process; return its stdout, show its output if it fails."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """A copy of the sources without anything that a build has made."""
    tree = tmp_path_factory.mktemp("source") / "kvpool"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCES)
    return tree


@pytest.fixture(scope="module")
def distributions(source_tree, tmp_path_factory):
    """The folder with one sdist and one wheel, the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source_tree, cwd=source_tree,
        KVPOOL_OPTIMIZE="0", KVPOOL_MLX_EXTENSION="0")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The site-packages of a new environment: the wheel, and numpy by links to this environment's."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    numpy_files = distribution("numpy").files
    for top in {file.parts[0] for file in numpy_files} - {".."}:
        (packages / top).symlink_to(distribution("numpy").locate_file(top))
    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    run(sys.executable, "-m", "pip", "--python", environment / "bin" / "python", *install, cwd=environment)
    return packages


def in_environment(site, code, *flags):
    """Run code with the interpreter of the new environment, far from the sources."""
    python = site.parent.parent.parent / "bin" / "python"
    return run(python, "-W", "error", *flags, "-c", textwrap.dedent(code), cwd=site.parent).strip()


def test_sdist_holds_every_source_and_nothing_built(distributions, source_tree):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["kvpool", "kvpool_backends", "metal", "tests", "benchmarks", "docs", "examples", ".ci"]
    folders.append(".github")
    files = [file for folder in folders for file in (source_tree / folder).rglob("*")] + list(source_tree.glob("*"))
    expected = {str(file.relative_to(source_tree)) for file in files if file.is_file()}
    assert expected - {".gitignore", ".git"} - names == set()
    built = [name for name in names if re.search(r"^kvpool/.*\.c$|\.(so|html|pyc)$", name)]
    assert built == ["kvpool/serving/page.html"]  # which is written by hand


def test_wheel_holds_the_packages_and_nothing_else(wheel_names, source_tree):
    """The sources but for the inside of the core and the kernels, and an extension per module."""
    found = {name for name in wheel_names if not name.startswith(f"kvpool-{kvpool.__version__}.dist-info/")}
    expected = {"kvpool/serving/page.html"}
    places = {"kvpool": "kvpool", "kvpool_backends": "kvpool_backends", "metal": "kvpool_backends/metal"}
    for folder, place in places.items():
        for path in (source_tree / folder).rglob("*"):
            if path.parent.name == "kernels" and path.name != "kvcpu.h":
                continue  # compiled
            if path.suffix == ".pxd" and path.name not in ("__init__.pxd", "capi.pxd"):
                continue  # the inside, which is not an interface
            name = f"{place}/{path.relative_to(source_tree / folder)}"
            if path.suffix == ".pyx":
                expected.add(name.removesuffix(".pyx") + EXTENSION_SUFFIXES[0])
            elif path.suffix in (".py", ".pyi", ".pxd", ".metal", ".h", ".cpp") or path.name == "py.typed":
                expected.add(name)
    assert found == expected


#: An engine as a user writes it, whose comments name what each checker has to say of its mistakes.
PROGRAM = ROOT / "tests" / "helpers" / "user_program.py"
MARK = {"mypy": r"# type: ignore\[([\w-]+)\]", "pyright": r"# pyright: ignore\[(\w+)\]"}


def planted(checker):
    """(line, rule) of each mistake that the program's comments name."""
    lines = enumerate(PROGRAM.read_text().splitlines(), 1)
    return {(number, rule) for number, line in lines for rule in re.findall(MARK[checker], line)}


def reported(checker, folder, python):
    """(line, rule) of each mistake that a checker finds in the program without its comments, in `folder`."""
    program = folder / PROGRAM.name
    program.write_text(re.sub(r"  # type: ignore.*", "", PROGRAM.read_text()))
    options = {
        "mypy": ["--python-executable", python, "--config-file=", "--cache-dir", "cache", "--no-error-summary"],
        "pyright": ["--pythonpath", python, "--outputjson"],
    }[checker]
    result = subprocess.run(
        [sys.executable, "-m", checker, *options, program.name],
        cwd=folder, env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    if checker == "pyright":
        found = json.loads(result.stdout)["generalDiagnostics"]
        return {(one["range"]["start"]["line"] + 1, one["rule"]) for one in found}
    found = re.findall(r"^user_program\.py:(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    return {(int(line), rule) for line, rule in found}


@pytest.mark.parametrize("checker", MARK)
def test_types_of_the_wheel_are_those_of_the_sources(checker, site, tmp_path):
    """A user's program far from the sources; without a py.typed all of kvpool_backends would be Any."""
    python = site.parent.parent.parent / "bin" / "python"
    assert len(planted(checker)) > 12
    assert reported(checker, tmp_path, python) == planted(checker)


def test_metadata_name_license_and_version_and_their_links_leave_the_checkout(wheel_names, wheel):
    assert any(name.endswith("LICENSE") for name in wheel_names)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"kvpool-{kvpool.__version__}.dist-info/METADATA").decode()
    assert "License-Expression: MIT\n" in metadata and f"Version: {kvpool.__version__}\n" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata.split("\n\n", 1)[1])
    assert len(links) > 15 and [link for link in links if not link.startswith("https://")] == []


def test_wheel_is_small(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as optimized:
        for name in archive.namelist():
            optimized.writestr(name, (ROOT / name).read_bytes() if name.endswith(".so") else archive.read(name))
    assert (tmp_path / "x").stat().st_size <= WHEEL_BYTES_MAX


def test_wheel_works_with_numpy_alone(site):
    """Imported from the wheel with warnings as errors, in an environment without mlx; the kernels compute."""
    assert in_environment(site, USE, "-I").startswith(str(site))


def test_wheel_declares_the_command_and_the_backends(site):
    """Every name that the metadata declare leads to something, but for the framework that is not there."""
    code = """
        from importlib.metadata import distribution
        import kvpool_backends
        names = {(entry.group, entry.name): entry.value for entry in distribution("kvpool").entry_points}
        assert names.pop(("console_scripts", "kvpool")) == "kvpool.cli:main"
        import kvpool.cli
        assert callable(kvpool.cli.main)
        assert names.pop(("vllm.general_plugins", "kvpool")) == "kvpool.adapters.vllm:register"
        import kvpool.adapters.vllm
        kvpool.adapters.vllm.register()  # nobody asked for it: it needs no vLLM
        for (group, name), value in names.items():
            assert group == "kvpool.backends" and kvpool_backends._BUILT_IN[name] == value
        print(sorted(name for _, name in names))
    """
    assert in_environment(site, code, "-I") == "['cpu', 'mlx', 'numpy']"
    assert (site.parent.parent.parent / "bin" / "kvpool").exists()


@pytest.fixture
def build_lib(tmp_path):
    """What setuptools has put together when it comes to MLX's extension."""
    for folder, place in (("kvpool", "kvpool"), ("kvpool_backends", "kvpool_backends")):
        shutil.copytree(ROOT / folder, tmp_path / place, ignore=shutil.ignore_patterns("__pycache__", "built"))
    shutil.copytree(ROOT / "metal", tmp_path / "kvpool_backends" / "metal")
    return tmp_path


@pytest.fixture
def setup_file():
    spec = spec_from_file_location("kvpool_setup", ROOT / "setup.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_installation_brings_the_extension_for_the_mlx_that_is_there(build_lib, setup_file):
    said = setup_file.mlx_extension(build_lib)
    code = "from kvpool_backends.mlx.native import status; found = status(); print(found['active'], found['folder'])"
    away = {"PYTHONPATH": str(build_lib), "KVPOOL_MLX_NATIVE": "1", "KVPOOL_MLX_NATIVE_DIR": str(build_lib / "none")}
    active, folder = run(sys.executable, "-c", code, cwd=build_lib, **away).split()
    assert active == "True" and Path(folder).is_relative_to(build_lib) and folder in said


def test_an_installation_goes_on_without_the_extension_and_says_why(build_lib, setup_file, monkeypatch):
    command = "`python -m kvpool_backends.mlx.native build` builds it"
    monkeypatch.setenv("CXX", "false")
    said = setup_file.mlx_extension(build_lib)
    assert "could not build the extension: false ended with 1" in said and said.endswith(command) and "\n" not in said
    monkeypatch.setattr(setup_file.sys, "executable", str(build_lib / "no-python"))
    assert "no-python" in setup_file.mlx_extension(build_lib)
    monkeypatch.setattr(setup_file.sysconfig, "get_path", lambda scheme: str(build_lib))
    assert setup_file.mlx_extension(build_lib) == (
        f"MLX's extension is not built (MLX is not installed here yet); {command}"
    )


@pytest.mark.parametrize("origin", ["wheel", "get_include"])
def test_another_extension_can_cimport_kvpool(origin, tmp_path, request):
    """Compiled and run against an installed wheel, and against this build by `kvpool.get_include`."""
    site = str(request.getfixturevalue("site")) if origin == "wheel" else kvpool.get_include()
    shutil.copy(ROOT / "tests" / "downstream.pyx", tmp_path)
    (tmp_path / "setup.py").write_text(
        "from Cython.Build import cythonize\nfrom setuptools import setup\n"
        f'setup(name="downstream", py_modules=[], ext_modules=cythonize("downstream.pyx", include_path=[{site!r}]))\n'
    )
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tmp_path, CFLAGS="-O0")
    code = """
        import downstream, kvpool
        pool = kvpool.Pool(16, 4)
        engine = downstream.Engine(pool, kvpool.Plan(pool, 2))
        print(kvpool.__file__, engine.decode([pool.open(5), pool.open()]))
    """
    output = run(sys.executable, "-c", textwrap.dedent(code), cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{site}")
    assert output.startswith(site) and output.endswith("[1, 1]\n")


NEEDS_CARGO = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")


@pytest.mark.parametrize("kind", ["c", "cython", pytest.param("rust", marks=NEEDS_CARGO)])
def test_native_example_runs_on_an_installed_wheel(kind, site, tmp_path):
    """The command of docs/embedding.md, far from the sources of kvpool."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    output = run(sys.executable, "examples/run.py", kind, cwd=tmp_path, PYTHONPATH=str(site))
    assert output.startswith(f"kvpool of {site}") and f": {kind} gives" in output


def test_source_tree_that_is_not_built_says_what_to_type(source_tree):
    result = subprocess.run(
        [sys.executable, "-S", "-c", "import kvpool"],
        cwd=source_tree,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert result.returncode != 0
    assert "make build" in result.stderr.splitlines()[-1]


def test_import_brings_in_numpy_and_no_framework():
    code = "import json, sys, kvpool; print(json.dumps(list(sys.modules)))"
    listed = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    modules = {module.partition(".")[0] for module in json.loads(listed)}
    assert modules & {"numpy", *FRAMEWORKS} == {"numpy"}
