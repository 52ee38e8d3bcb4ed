"""The extension that writes into MLX's pool as a node of its graph: in place, in order, and only where it fits."""

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import batch_tokens, on_cpu, random_prompts, solo_tokens, tiny_gpt_oss, tiny_llama

from kvpool.adapters.mlx_lm import Engine, install
from kvpool.config import LAYOUTS, KVSpec
from kvpool.protocol import StepArrays
from kvpool.testing import conformance
from kvpool_backends.mlx import MLXBackend
from kvpool_backends.mlx import native as extension
from kvpool_backends.mlx.native import __main__ as native_build
from kvpool_backends.mlx.native import load, status
from kvpool_backends.mlx.native.__main__ import BuildError, build, compile_to
from kvpool_backends.mlx.native.pool import PoolMoved

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4, layout="NHD")
LOGGER = "kvpool_backends.mlx.native"


@contextlib.contextmanager
def looking_in(folder):
    """The process finds the extension there, as if it looked for the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPOOL_MLX_NATIVE_DIR", str(folder))
        patch.delenv("KVPOOL_MLX_NATIVE", raising=False)
        extension._load.cache_clear()
        try:
            yield
        finally:
            extension._load.cache_clear()


@pytest.fixture
def native(built):
    with looking_in(built), on_cpu():
        assert load() is not None, status()["why"]
        yield MLXBackend


def row(backend, block, length, new=1):
    """A step that writes the last `new` of `length` tokens of a sequence whose blocks are `block`, `block` + 1, ..."""
    size = backend.spec.block_size
    table = np.arange(block, block - (-length // size), dtype=np.int32)[None]
    slots = np.arange(length - new, length, dtype=np.int32) + block * size
    plan = StepArrays(table, np.int32([length]), np.int32([0, new]), slots)
    return backend.prepare(plan)


def tokens(value, count=1, spec=SPEC):
    return mx.full((count, spec.num_kv_heads, spec.head_dim), float(value))


# --------------------------------------------------------------------------------------------- the kit


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_native_backend_conforms(case, native):
    def of_the_extension(spec, num_blocks):
        if spec.layout == "block":  # MLXBackend takes another route there
            raise ValueError(spec.layout)
        return native(spec, num_blocks)

    left_out = {
        *("attention_weights_are_returned", "scores_come_after_weights", "scores_out_is_filled_in_place"),
        *("shapes_in_one_arena_equal_dense_attention", "layers_of_one_group_may_differ"),
        "given_rows_are_used_and_nothing_between_them",
    }
    expected = "not applicable" if case.__name__ in left_out else "passed"
    assert conformance.check_backend(of_the_extension, [case]) == {case.__name__: expected}


# ------------------------------------------------------------------------------------- lazy and in order


def test_calls_are_lazy_and_evaluating_a_result_evaluates_what_came_before(native):
    backend = native(SPEC, 8)
    for layer in range(SPEC.num_layers):
        backend.write(row(backend, 2, 3, 3), layer, tokens(1, 3), tokens(2, 3))
    out = backend.attend(row(backend, 2, 3, 3), 1, mx.repeat(tokens(1, 3), 2, axis=1))
    memory = np.asarray(memoryview(backend._pool.arrays[2]))
    assert not memory.any()  # nothing has run
    mx.eval(out)
    assert (np.array(out) == 2).all() and memory[2, :3].all()
    assert not np.asarray(memoryview(backend._pool.arrays[0])).any()  # nobody has asked for layer 0
    mx.eval(backend.queued(0))
    assert np.asarray(memoryview(backend._pool.arrays[0]))[2, :3].all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_give_what_the_eager_route_gives(native, layout, seed):
    """Operations on overlapping blocks, evaluated in any order or not at all before the end, on two streams."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    spec = KVSpec(2, 2, 8, "float32", 4, layout=layout)
    lazy, eager = native(spec, 6), native(spec, 6, native=False)
    streams = [mx.default_stream(mx.cpu), mx.new_stream(mx.cpu)]
    pending, expected = [], []
    for _ in range(60):
        layer, block, length = rng.integers(2), rng.integers(5), rng.integers(1, 5)
        kind = rng.choice(["write", "attend", "both", "copy", "zero", "evaluate"])
        k, v, q = (rng.standard_normal((length, heads, 8)).astype(np.float32) for heads in (2, 2, 4))
        slots = np.arange(length, dtype=np.int32) + 4 * block
        plan = StepArrays(np.int32([[block]]), np.int32([length]), np.int32([0, length]), slots)
        if kind == "evaluate" and pending:
            mx.eval(pending[rng.integers(len(pending))])
        for backend, results in ((lazy, pending), (eager, expected)):
            with mx.stream(streams[rng.integers(2)]):
                if kind in ("write", "both"):
                    backend.write(backend.prepare(plan), layer, mx.array(k) * 1, mx.array(v) * 1)
                if kind in ("attend", "both"):
                    results.append(backend.attend(backend.prepare(plan), layer, mx.array(q) * 1))
                if kind == "copy":
                    backend.copy_blocks(np.int32([[block, (block + 1) % 6, length]]))
                if kind == "zero":
                    backend.zero([block])
    for i in rng.permutation(len(pending)):
        np.testing.assert_array_equal(np.array(pending[i]), np.array(expected[i]))
    assert lazy.export_blocks(range(6)).tobytes() == eager.export_blocks(range(6)).tobytes()
    assert lazy.settle() == 0


def test_results_are_not_kept_by_the_pool(native):
    backend = native(SPEC, 64)
    step = row(backend, 0, 200, 200)
    q = mx.zeros((200, 64, SPEC.head_dim))
    mx.eval(q, backend.attend(step, 0, q))
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(20):
        mx.eval(backend.attend(step, 0, q))
    mx.synchronize()
    mx.clear_cache()
    assert mx.get_active_memory() < before + 2 * q.nbytes


# --------------------------------------------------------------------------------------------- in place


def decode(backend, num_steps, pipelined, context=48):
    """Steps of an engine that decodes four rows in two layers."""
    spec = backend.spec
    width = -(-context // spec.block_size)
    tables = np.arange(4 * width, dtype=np.int32).reshape(4, width)
    lens = np.full(4, context)
    x, previous = mx.ones((4, 2 * spec.num_kv_heads, spec.head_dim)), None
    for step in range(num_steps):
        at = step % context
        slots = tables[:, at // spec.block_size] * spec.block_size + at % spec.block_size
        arrays = backend.prepare(StepArrays(tables, lens, np.arange(5, dtype=np.int32), slots))
        for layer in range(spec.num_layers):
            k = x[:, : spec.num_kv_heads] * 0.5 + step
            backend.write(arrays, layer, k, k)
            x = backend.attend(arrays, layer, x) * 0.5 + 1
        mx.async_eval(x)
        if not pipelined:
            mx.eval(x)
        elif previous is not None:
            mx.eval(previous)
        previous = x
    mx.eval(x)


@pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])
def test_pool_stays_where_it_is(native, pipelined):
    spec = KVSpec(2, 4, 64, "float16", 16)
    backend = native(spec, 64 * 2**20 // spec.block_nbytes)
    addresses = backend._pool.addresses()
    decode(backend, 5, pipelined)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decode(backend, 150, pipelined)
    assert mx.get_peak_memory() - before < 4 * 2**20  # a plane has 16 MiB
    assert backend.settle() == 0 and backend.pool_copies == 0
    assert backend._pool.addresses() == addresses


def plant_copy(backend, layer=0):
    """A handle that denotes a copy of its array: what MLX's own scatter leaves when a read is in flight."""
    (handle, *_) = backend._lazy._layers[layer][1].handles
    backend._module.share(handle, handle + 0)


def test_planted_copy_is_found_by_the_next_node(native):
    backend = native(SPEC, 8)
    plant_copy(backend)
    backend.write(row(backend, 1, 1), 0, tokens(1), tokens(1))
    with pytest.raises(RuntimeError, match="not where it was"):
        mx.eval(backend.queued(0))


def test_planted_copy_after_a_write_is_found_when_the_pool_settles(native):
    backend = native(SPEC, 8)
    backend.write(row(backend, 1, 1), 0, tokens(1), tokens(1))
    assert backend.settle() == 0
    plant_copy(backend)
    with pytest.raises(PoolMoved, match="it was at"):
        backend.settle()


# ------------------------------------------------------------------------------------------------ misuse


def test_refused_calls_leave_no_node(native):
    backend = native(SPEC, 8)
    step, q = row(backend, 1, 1), mx.repeat(tokens(0), 2, axis=1)
    far = StepArrays(np.int32([[8]]), np.int32([1]), np.int32([0, 1]))
    backend.write(step, 0, tokens(3), tokens(3))
    for error, text, call in (
        (ValueError, r"k must have shape \[1, 2, 8\]", lambda: backend.write(step, 0, tokens(1, 2), tokens(1, 2))),
        (TypeError, "v must be float32", lambda: backend.write(step, 0, tokens(1), tokens(1).astype(mx.int32))),
        (IndexError, "layer is 2", lambda: backend.write(step, 2, tokens(1), tokens(1))),
        (ValueError, "3 heads", lambda: backend.attend(step, 0, mx.zeros((1, 3, 8)))),
        (ValueError, "T, Hq, 8", lambda: backend.attend(step, 0, mx.zeros((1, 2, 4)))),
        (ValueError, "cu_q_lens", lambda: backend.attend(step, 0, mx.zeros((0, 2, 8)))),
        (IndexError, "slots 0 .. 31", lambda: row(backend, 8, 1)),
        (IndexError, "blocks 0 .. 7", lambda: backend.attend(backend.prepare(far), 0, q)),
        (ValueError, "there twice", lambda: backend.copy_blocks(np.int32([[0, 1, 1], [2, 1, 1]]))),
        (RuntimeError, "compile", lambda: mx.compile(lambda x: backend.attend(step, 0, x + 1))(q)),
        (RuntimeError, "compile", lambda: mx.compile(lambda x: backend.write(step, 0, x, x))(tokens(1))),
    ):
        with pytest.raises(error, match=text):
            call()
    assert (np.array(backend.attend(step, 0, q)) == 3).all()


def test_threads_take_turns_under_a_lock(native):
    """The promise: one thread at a time, and who leaves has settled."""
    backend, lock = native(SPEC, 16), threading.Lock()

    def work(block):
        for turn in range(25):
            with lock:
                step = row(backend, block, 1)
                backend.write(step, 0, tokens(turn), tokens(turn + block))
                out = np.array(backend.attend(step, 0, tokens(0)))
                backend.settle()
            assert (out == turn + block).all()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (1, 9)))
    assert backend.settle() == 0


# --------------------------------------------------------------------------------------- mlx-lm's engines


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gpt_oss], ids=lambda make: make.__name__)
def test_mlx_lm_gives_the_tokens_of_stock_caches(native, make_model):
    model = make_model()
    prompts = random_prompts((3, 6, 40, 1, 17))
    alone = [solo_tokens(model, prompt) for prompt in prompts]
    with install(model, num_blocks=64) as kv:
        assert kv.passes.is_fused and type(kv.backend).__name__ == "NativeBackend"
        assert [solo_tokens(model, prompt) for prompt in prompts] == alone
        assert batch_tokens(model, prompts) == alone
        assert kv.summary().mlx_pool_copies == 0


# ---------------------------------------------------------------------------------- what does not fit


def falls_back(folder, caplog):
    """The one line in the log, after the backend was made without the extension."""
    caplog.clear()
    with looking_in(folder), caplog.at_level(logging.DEBUG, LOGGER):
        for _ in range(3):
            assert type(MLXBackend(SPEC, 8, kernels=True)).__name__ == "KernelBackend"
        state = status()
        assert not state["active"] and state["built"] and state["why"]
        with pytest.raises(Exception, match=r"native"):
            MLXBackend(SPEC, 8, native=True)
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert state["why"] in record.getMessage()
    return state["why"]


@pytest.mark.parametrize("writes", [((),), (["k"] * 6,), (None,), (("k",) * 6,), ((("k", "text"),) * 5,)])
def test_texts_of_kernels_in_another_shape_are_refused(native, writes):
    kernel = ("k", "text")
    with pytest.raises(TypeError, match=r"\[metal_texts\] kernel|\[metal_texts\] a kernel"):
        load().metal_texts(writes, kernel, kernel, kernel)


@pytest.fixture
def copy(built, tmp_path):
    folder = tmp_path / "native"
    shutil.copytree(built, folder)
    with on_cpu():
        yield folder


def restamp(folder, **changes):
    stamp = folder / "stamp.json"
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | changes))


def halve(folder):
    """A truncated library can end the process that maps it: its checksum is looked at before."""
    path = extension.library(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_library(folder):
    path = extension.library(folder)
    path.write_bytes(b"no library at all")
    restamp(folder, checksum=extension.checksum(path))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (partial(restamp, mlx="0.32.3"), "built for mlx"),
        (partial(restamp, libraries={"libmlx.so": 1}), "built for libraries"),
        (partial(restamp, python="cpython-310"), "built for python"),
        (partial(restamp, sources="0" * 64), "built for sources"),
        (lambda folder: (folder / "stamp.json").write_text("[]"), ""),
        (lambda folder: (folder / "stamp.json").write_text("no json"), ""),
        (halve, "damaged"),
        (replace_library, "cannot be imported (ImportError"),
    ],
)
def test_extension_that_does_not_fit_falls_back_with_one_log_line(copy, caplog, damage, why):
    damage(copy)
    assert why in falls_back(copy, caplog)


class Faulty:
    """A module with some functions replaced."""

    def __init__(self, module, **replaced):
        self.__dict__.update(replaced)
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)


def test_self_check_catches_planted_faults(native):
    module = load()
    extension.self_check(module)

    def copies(*args):
        module.run(*args)
        (handle,) = args[1]
        module.share(handle, handle + 0)

    for fault, text in (
        ({"mlx_version": lambda: "0.0.0"}, "0.0.0"),
        ({"shape": lambda x: (5, 3)}, r"\(3, 5\) looks like \(5, 3\)"),
        ({"run": copies}, "not the memory of its input"),
    ):
        with pytest.raises(extension.Unfit, match=text):
            extension.self_check(Faulty(module, **fault))


def test_an_extension_of_the_wheel_is_used_until_the_user_builds_one(built, tmp_path, monkeypatch):
    opened = []
    real = extension.open_module
    monkeypatch.setattr(extension, "open_module", lambda where: (opened.append(where), real(where))[1])
    wheel, own = tmp_path / "wheel", tmp_path / "own"
    shutil.copytree(built, wheel)
    monkeypatch.setattr(extension, "shipped", lambda: wheel)
    with looking_in(own):
        assert load() is not None and status()["active"] and status()["folder"] == str(wheel)
    shutil.copytree(built, own)
    with looking_in(own):
        assert load() is not None
    restamp(own, sources="0" * 64)  # an older kvpool's
    with looking_in(own):
        assert load() is not None and status()["folder"] == str(wheel)
    assert opened == [wheel, own, own, wheel]


def test_extension_of_a_wheel_looks_for_the_mlx_beside_kvpool_first(tmp_path, monkeypatch):
    """The folder of its builder may exist on the user's machine, with another MLX in it."""
    links = []

    def run(command, **_):
        if "-lmlx" in command:
            links.append([word.removeprefix("-Wl,-rpath,") for word in command if word.startswith("-Wl,-rpath,")])
            Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(native_build, "_run", run)
    monkeypatch.setattr(extension, "shipped", lambda: tmp_path / "kvpool_backends" / "mlx" / "native" / "built" / "1.0")
    builder = str(extension.mlx_folder() / "lib")
    for where in (extension.shipped(), tmp_path / "cache"):
        build(where)
    (first, *others), own = links
    variable = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    assert Path(os.path.normpath(first.replace(variable, str(extension.shipped())))) == tmp_path / "mlx" / "lib"
    assert others == own == [builder]


def test_extension_that_is_not_built_or_switched_off_is_no_news(built, tmp_path, monkeypatch, caplog):
    with looking_in(tmp_path), on_cpu(), caplog.at_level(logging.DEBUG, LOGGER):
        assert type(MLXBackend(SPEC, 8)).__name__ == "KernelBackend"
        state = status()
    assert not state["built"] and state["why"] == f"not built for MLX {mx.__version__}"
    with looking_in(built), on_cpu(), caplog.at_level(logging.DEBUG, LOGGER):
        monkeypatch.setenv("KVPOOL_MLX_NATIVE", "0")
        assert load() is None and status()["built"] and "KVPOOL_MLX_NATIVE" in status()["why"]
    assert not caplog.records


def test_failing_build_says_what_the_compiler_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false ended with 1"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())  # no half-made module, no stamp
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(BuildError, match="no-such-compiler"):
        compile_to(tmp_path)


def test_a_decode_step_of_the_engine_is_one_evaluation(built, monkeypatch):
    """Layers, attention and sampling: MLX is asked once, and the next step is under way when the tokens are read."""
    asked = []
    with on_cpu(), looking_in(built), Engine(tiny_llama(), 100, block_size=4) as engine:
        assert type(engine.kv.backend).__name__ == "NativeBackend"
        for prompt in random_prompts([5, 9, 3]):
            engine.submit(prompt, max_tokens=30)
        for _ in range(5):
            engine.step()
        for name in ("eval", "async_eval"):
            call = getattr(mx, name)
            monkeypatch.setattr(mx, name, lambda *x, name=name, call=call: asked.append(name) or call(*x))
        for _ in range(10):
            engine.step()
        assert engine.kv.pool.stats().pending == 1
        monkeypatch.undo()
    assert asked == ["async_eval"] * 10
