"""The examples in C, Cython and Rust do what Python does, make no object in a step, and refuse what does not fit."""

import ctypes
import gc
import importlib.util
import re
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from capi_table import HEADER, Api, api, member_name, members, prototype
from embedding_page import PAGE

import kvpool

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "examples"  # kept: a second run compiles nothing
spec = importlib.util.spec_from_file_location("examples_run", ROOT / "examples" / "run.py")
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)
needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
KINDS = ["c", "cython", pytest.param("rust", marks=needs_cargo)]
IN_PYTHON = {"python": examples.decode_python}
ONE_INT = 64  # bytes: the sum of more steps may be a longer integer, and ctypes keeps one for a moment


@pytest.fixture(scope="module")
def decode_in():
    """Return a function from the name of a language to its ``decode``, built when it is asked for."""
    made = dict(IN_PYTHON)

    def get(kind):
        if kind not in made:
            made[kind] = examples.load(kind, examples.build(kind, BUILD))
        return made[kind]

    return get


def new(num_blocks=64):
    pool = kvpool.Pool(num_blocks, 4, max_seqs=8, seed=1)
    return pool, kvpool.Plan(pool, 4), np.array([pool.open() for _ in range(4)], np.int64)


@pytest.mark.parametrize("kind", KINDS)
def test_example_does_what_python_does(decode_in, kind):
    assert examples.outcome(decode_in(kind)) == examples.outcome(examples.decode_python)


def test_example_in_cython_does_not_depend_on_what_a_pool_is(decode_in):
    """Their sizes change from release to release; ``from kvpool cimport capi`` would have them checked."""
    decode_in("cython")
    assert not re.search(r"__pyx_obj_\w*_(?:Pool|Plan)\b", (BUILD / "decode_cython.c").read_text())


def peak(function):
    """Return how many bytes of Python's memory a call held at most, more than before it."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    function()
    return tracemalloc.get_traced_memory()[1] - before


def growth(decode):
    """Return the bytes that 60 steps, those that take blocks included, hold for a moment more than 2 steps do."""
    pool, plan, handles = new(num_blocks=1024)
    decode(pool, plan, handles, 20)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        peaks = {2: [], 60: []}
        for steps in list(peaks) * 8:
            peaks[steps].append(peak(lambda steps=steps: decode(pool, plan, handles, steps)))
    finally:
        tracemalloc.stop()
        gc.enable()
    return min(peaks[60]) - min(peaks[2])


def kept(decode):
    """Return the number of Python's blocks of memory that 200 steps leave behind, at least, more than none do."""
    pool, plan, handles = new(num_blocks=4096)
    gc.collect()
    gc.disable()
    counts = {0: [], 200: []}
    try:
        for steps in list(counts) * 5:
            before = sys.getallocatedblocks()
            decode(pool, plan, handles, steps)
            counts[steps].append(sys.getallocatedblocks() - before)
    finally:
        gc.enable()
    return min(counts[200]) - min(counts[0])


@pytest.mark.parametrize("kind", KINDS)
def test_step_makes_no_object(decode_in, kind):
    assert growth(decode_in(kind)) <= ONE_INT
    assert kept(decode_in(kind)) <= 5


def test_measure_sees_an_object_that_a_step_makes(decode_in):
    """The test above can fail: a loop that makes one object more after thirty steps, for a moment or to stay."""
    stays = []

    def moment(pool, plan, handles, steps):
        return decode_in("c")(pool, plan, handles, steps) + len(bytes(500 if steps > 30 else 0))

    def leak(pool, plan, handles, steps):
        stays.extend([step] for step in range(steps // 30))
        return decode_in("c")(pool, plan, handles, steps)

    assert growth(moment) > ONE_INT
    assert kept(leak) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_failure_in_a_step_is_raised(decode_in, kind):
    """As by Python, after the same steps."""
    found = {}
    for who in ("python", kind):
        pool, plan, handles = new(num_blocks=10)  # 9 blocks of 4 tokens: the third block of a row is one too many
        with pytest.raises(kvpool.OutOfBlocks) as raised:
            decode_in(who)(pool, plan, handles, 100)
        found[who] = (pool.num_tokens(int(handles[0])), raised.value.needed, str(raised.value), pool.digest())
        pool.close(handles)
        with pytest.raises(kvpool.StaleHandle, match="is stale"):
            decode_in(who)(pool, plan, handles, 1)
        pool.check()
    assert found[kind] == found["python"]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_that_are_no_pool_are_refused(decode_in, kind):
    pool, plan, handles = new()
    before = pool.fingerprint()
    for objects in ((plan, pool), (object(), plan), (pool, None)):
        with pytest.raises(TypeError, match="this is not a kvpool"):
            decode_in(kind)(*objects, handles, 1)
    with pytest.raises(ValueError, match="belongs to another pool"):
        decode_in(kind)(pool, new()[1], handles, 1)
    assert pool.fingerprint() == before


NAME = ctypes.create_string_buffer(b"kvpool._C_API")
OTHER_NAME = ctypes.create_string_buffer(b"kvpool._B_API")
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
forged_tables = []  # a capsule does not own them


def forged(name=NAME, **changes):
    """Return a capsule with the table, changed."""
    table = Api.from_buffer_copy(api)
    for member, value in changes.items():
        setattr(table, member, value)
    forged_tables.append(table)
    return new_capsule(ctypes.addressof(table), ctypes.addressof(name), None)


MISFITS = {
    "magic": (lambda: forged(magic=1), "no table of kvpool's"),
    "newer version": (lambda: forged(abi_version=4), "ABI version 4, this extension was compiled for 3"),
    "older version": (lambda: forged(abi_version=2), "ABI version 2"),
    "smaller": (lambda: forged(struct_size=ctypes.sizeof(Api) - 8), "a newer kvpool is needed"),
    "empty": (lambda: forged(struct_size=0), "has 0 bytes"),
    "another capsule": (lambda: forged(OTHER_NAME), "no capsule named kvpool._C_API"),
    "no capsule": (lambda: 7, "no capsule named kvpool._C_API"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_capsule_that_does_not_fit_is_refused_at_import(decode_in, monkeypatch, tmp_path, misfit):
    decode_in("c")
    make, words = MISFITS[misfit]
    monkeypatch.setattr(kvpool, "_C_API", make(), raising=False)
    library = examples.build("c", BUILD)
    with pytest.raises(ImportError, match=re.escape(words)):
        examples.load("c", shutil.copy(library, tmp_path / library.name))


@needs_cargo
@pytest.mark.parametrize("misfit", [name for name in MISFITS if "capsule" not in name])
def test_capsule_that_does_not_fit_is_refused_by_rust(decode_in, monkeypatch, misfit):
    monkeypatch.setattr(kvpool, "_C_API", MISFITS[misfit][0](), raising=False)
    with pytest.raises(ImportError, match="not the one that this library was compiled for"):
        decode_in("rust")(*new(), 1)


def test_larger_table_is_taken(decode_in, monkeypatch, tmp_path):
    """A newer kvpool has more functions at the end."""
    decode_in("c")
    monkeypatch.setattr(kvpool, "_C_API", forged(struct_size=ctypes.sizeof(Api) + 16), raising=False)
    library = examples.build("c", BUILD)
    assert examples.load("c", shutil.copy(library, tmp_path / library.name))(*new(), 2) > 0


def test_table_in_rust_is_the_one_of_the_header():
    text = (ROOT / "examples" / "decode_rust" / "src" / "kvpool.rs").read_text()
    body = text.split("pub struct Api {")[1].split("\n}")[0]
    found = re.findall(r"pub (\w+):\s*(?:unsafe extern \"C\" fn\((.*?)\) ->|u\d\d)", body)
    expected = members(HEADER.read_text(), "kvpool_api")
    assert [name for name, _ in found] == [member_name(m) for m in expected]
    for (name, parameters), declaration in zip(found[3:], expected[3:], strict=True):
        kinds = [ctypes.c_int64 if p == "i64" else ctypes.c_int32 if p == "i32" else ctypes.c_void_p
                 for p in parameters.split(", ") if p]  # fmt: skip
        assert kinds == prototype(declaration)[1], name


def test_page_gives_the_command_of_every_example():
    assert {kind for kind in examples.SOURCES if f"python examples/run.py {kind}\n" in PAGE} == set(examples.SOURCES)
