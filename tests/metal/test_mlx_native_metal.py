"""The extension's part for Metal, compiled and run where there is no Metal.

`PoolOp::eval_gpu` is compiled against a header that stands in for MLX's Metal device and writes down what is encoded:
which text, which buffers, which grid. Then those launches are run by the tests' implementation of Metal, on the pool's
memory. What MLX and Metal make of the same calls only a Mac can tell.
"""

import ctypes
import importlib.machinery
import importlib.util
import math
import re
import time
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msl
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import KVCache
from mlx_models import on_cpu
from msl.arrays import METAL_TYPES
from test_mlx_native import looking_in

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing.dense import round_to
from kvpool_backends.cpu import default_isa
from kvpool_backends.mlx import MLXBackend
from kvpool_backends.mlx.base import DTYPES
from kvpool_backends.mlx.metal_kernels import per_head
from kvpool_backends.mlx.native import SOURCES, load
from kvpool_backends.mlx.native import backend as native_backend
from kvpool_backends.mlx.native.__main__ import compile_module
from kvpool_backends.mlx.native.backend import metal_texts
from kvpool_backends.mlx.native.pool import InPlacePool

STORED = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NUM_BLOCKS = 6


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    """The extension's node with a stand-in for MLX's Metal device."""
    folder = Path(__file__).parents[1] / "mlx_metal_recorder"
    made = tmp_path_factory.mktemp("recorder") / f"_recorder{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    files = [SOURCES / "pool_op.cpp", SOURCES / "pool_op_metal.cpp", folder / "recorder.cpp"]
    compile_module(files, made, ["-DKVPOOL_METAL", "-I", str(folder)])
    loader = importlib.machinery.ExtensionFileLoader("_recorder", str(made))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_recorder", loader))
    loader.exec_module(module)
    return module


@cache
def compiled(text, kernel, arguments):
    return msl.Kernel(text, kernel, arguments)


def run_recorded(launch, parameters, access):
    """Run a launch by the stand-in; returns what the last of its `parameters`, (index, name, dtype), is bound to.

    `access` says how a buffer is used, by its name, whether it is bound as an output, and its address.
    """
    _, text, bindings, grid, group = launch
    (kernel, arguments) = re.search(r"decltype\((\w+)<(.*)>\)", text).groups()
    bound = {}
    for index, name, dtype in parameters:
        if isinstance(bindings[index], bytes):
            array, how = np.frombuffer(bindings[index], dtype).copy(), "read_only"
        else:
            is_output, address, nbytes, _ = bindings[index]
            array = np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)
            how = access(name, is_output, address)
        bound[index] = msl.Bound(array, how, name)
    text = text[: text.rindex("template [[host_name")]  # the stand-in names instances in its own way
    with msl.settings(seed=1, instrumented=True):
        compiled(text, kernel, arguments).launch(bound, grid, group)
    return array


class OnMetal:
    """A pool whose nodes are recorded and then run by the stand-in; and the same pool by the CPU kernels."""

    def __init__(self, recorder, spec, num_blocks=NUM_BLOCKS):
        self.recorder, self.module = recorder, load()
        self.backend = MLXBackend(spec, num_blocks, native=False)
        self.spec = spec = self.backend.spec  # with a layout
        self.expected = MLXBackend(spec, num_blocks, native=False)
        rng = np.random.default_rng(0)
        content = rng.integers(0, 60, (num_blocks, spec.block_nbytes), np.uint8)
        for backend in (self.backend, self.expected):
            backend.import_blocks(range(num_blocks), content)
        texts = metal_texts(self.module, spec)
        self.pool = InPlacePool(
            self.module, spec, num_blocks, self.backend._pool, isa=default_isa(), on_gpu=True, metal=texts
        )

    def record(self, layer, *, reads=(), step=None, copies=None, k=None, v=None):
        capsule, chain = self.pool._layers[layer]
        mx.eval(*(x for x in (*reads, k, v) if x is not None))
        return self.recorder.record(mx.array, chain.handles, tuple(reads), capsule, step, copies, None, k, v)

    def write(self, layer, k, v, slots):
        spec = self.spec
        slots = np.asarray(slots, np.int64)
        step = self.module.step(1, NUM_BLOCKS, spec.block_size, slots, 0, None, None, None)
        launches, _, _ = self.record(layer, step=step, k=k, v=v)
        self.expected.store.write(layer, k, v, slots)
        return launches

    def run(self, launches, names, dtypes):
        for launch in launches:
            function, text, bindings, _, group = launch
            assert f'host_name("{function}")' in text and group[0] * group[1] * group[2] <= 256
            seen = set()

            def access(name, is_output, address, seen=seen):
                # A plane that is bound twice is written through the first: buffers of the stand-in lie apart.
                is_first = address not in seen
                seen.add(address)
                return "in_out" if is_output and is_first else "read_only"

            kinds = [np.int64 if isinstance(bindings[i], bytes) else dtypes[i] for i in range(len(bindings))]
            run_recorded(launch, zip(range(len(bindings)), names, kinds, strict=True), access)

    def check(self):
        np.testing.assert_array_equal(
            self.backend.export_blocks(range(NUM_BLOCKS)), self.expected.export_blocks(range(NUM_BLOCKS))
        )


@pytest.fixture
def on_metal(recorder, built):
    with looking_in(built), on_cpu():
        yield lambda spec: OnMetal(recorder, spec)


def values(shape, dtype, seed):
    x = round_to(np.random.default_rng(seed).standard_normal(shape) * 10, dtype)
    return mx.array(x.astype(np.float32)).astype(DTYPES[dtype])


PACKED = (
    KVSpec(2, 3, 64, "float16", 8, 96, k_bits=8, v_bits=4, quant_group_size=32),
    KVSpec(2, 2, 128, "bfloat16", 16, layout="HND", k_bits=4, v_bits=4, quant_group_size=64),
    KVSpec(2, 2, 64, "float32", 8, k_bits=8, quant_group_size=64),
    KVSpec(2, 2, 64, "float16", 8, k_bits=8, v_bits=8, quant_group_size=32),
    KVSpec(2, 2, 128, "float16", 8, layout="HND", v_bits=8, quant_group_size=128),
)
WRITES = [
    (KVSpec(2, 2, 64, "float16", 8), "float32"),
    (KVSpec(2, 3, 80, "bfloat16", 16, 96, "HND"), "bfloat16"),
    (KVSpec(2, 2, 64, "float32", 8), "float16"),
    *((spec, "float32") for spec in PACKED),
]


def name_of(x):
    return f"{x.layout}-{x.bits}" if isinstance(x, KVSpec) else x


@pytest.mark.parametrize("strided", [False, True], ids=["vectors", "elements"])
@pytest.mark.parametrize(("spec", "tokens"), WRITES, ids=name_of)
def test_recorded_write_stores_what_the_cpu_kernels_store(on_metal, spec, tokens, strided):
    """One launch for floats, or one for each plane, of numbers or of floats."""
    pool, stored, slots = on_metal(spec), STORED[spec.dtype], [5, -1, 17, 0, 40, 41]
    k, v = (values((len(slots), spec.num_kv_heads, dim), tokens, seed) for seed, (_, dim) in enumerate(spec.planes))
    if strided:  # elements of a row lie apart
        k, v = (mx.contiguous(x.transpose(2, 0, 1)).transpose(1, 2, 0) for x in (k, v))
    launches = pool.write(1, k, v, slots)
    every = [None] if spec.bits == (None, None) else spec.bits
    assert ["kv_write_packed" in name for name, *_ in launches] == [bits is not None for bits in every]
    assert every != [None] or ("_0_" in launches[0][0]) == strided  # the last template argument: by vectors or not
    for launch, bits in zip(launches, every, strict=True):
        if bits is None:
            names = ("k_pool", "v_pool", "k", "v", "slots", "layout", "strides")
            pool.run([launch], names, (stored, stored, STORED[tokens], STORED[tokens], np.int64))
        else:
            names = ("words", "scales", "biases", "x", "slots", "layout", "strides")
            pool.run([launch], names, (np.uint32, stored, stored, STORED[tokens], np.int64))
    pool.check()


@pytest.mark.parametrize(
    "spec",
    [
        *(KVSpec(2, 3, 32, "float16", 8, layout=layout) for layout in ("NHD", "HND")),
        *PACKED,
    ],
    ids=name_of,
)
def test_recorded_copy_copies_what_the_cpu_kernels_copy(on_metal, spec):
    pool = on_metal(spec)
    copies = np.array([[0, 3, 8], [0, 4, 5], [2, 5, 1]])
    for layer in range(2):
        launches, _, _ = pool.record(layer, copies=pool.module.copies(1, copies))
        assert len(launches) == len(spec.stored_planes)
        for launch, plane in zip(launches, spec.stored_planes, strict=True):
            dtype = np.uint32 if plane.dtype == "uint32" else STORED[plane.dtype]
            pool.run([launch], ("pool", "copies", "layout"), (dtype, np.int32))
    pool.expected.copy_blocks(copies.astype(np.int32))
    pool.check()


def test_nothing_is_launched_for_no_tokens(on_metal):
    pool = on_metal(KVSpec(1, 2, 32, "float16", 8))
    empty = mx.zeros((0, 2, 32))
    assert pool.write(0, empty, empty, []) == []


def test_reads_by_other_kernels_are_sealed(on_metal):
    """After one the pool's buffers count as outputs, of an encoder that has the read's result as an input."""
    pool = on_metal(KVSpec(1, 2, 32, "float16", 8))
    result = mx.ones((3, 5)) * 2
    launches, registered, seen = pool.record(0, reads=[result, mx.zeros((0,))])
    assert launches == []
    assert registered == list(pool.pool._layers[0][1].addresses)
    assert seen == [pool.module.address(result)]


def test_limits_are_those_of_the_kernel_that_mlx_has_compiled(recorder, built):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\[metal_limits\] MLX has not compiled a kernel custom_kernel_x"):
            recorder.metal_limits("custom_kernel_x")
    recorder.compiled("custom_kernel_x")
    assert recorder.metal_limits("custom_kernel_x") == (768, 32, len("custom_kernel_x"))
    with looking_in(built), pytest.raises(RuntimeError, match="was built without Metal"):
        load().metal_limits("custom_kernel_x")


# ------------------------------------------------------------------------------------------- attention

NUMPY = {text: "u2" if name == "bfloat16" else name for name, text in METAL_TYPES.items()} | {"int": "i4"}
OPTIONS = {"window": 70, "soft_cap": 2.0, "sinks": np.linspace(-1, 2, 6), "alibi_slopes": np.linspace(0, 0.3, 6)}
ATTENDED = {
    "parts and their sum": (KVSpec(3, 2, 64, "float16", 8), 4, (1, 1), {}),
    "a matrix": (KVSpec(3, 1, 128, "bfloat16", 16), 16, (1, 1), {}),
    "packed with options": (KVSpec(3, 2, 64, "float16", 8, k_bits=8, v_bits=4), 3, (1, 1), OPTIONS),
    "heads apart": (KVSpec(3, 2, 64, "float32", 8, layout="HND"), 2, (1, 1), {}),
    "a row for each kernel": (KVSpec(3, 2, 64, "float16", 8, layout="HND"), 4, (1, 3), {}),
}


class Attending:
    """A backend whose attention is a node for each layer, and the same pool by the CPU kernels."""

    def __init__(self, spec, group, q_lens, options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_backend, "has_metal", lambda: True)
            self.backend = MLXBackend(spec, 32, native=True, metal_kernel=mx.fast.metal_kernel)
        self.expected = MLXBackend(self.backend.spec, 32, native=False)
        self.spec, self.num_heads = spec, group * spec.num_kv_heads
        slots = np.arange(32 * spec.block_size)
        for layer in range(spec.num_layers):
            k, v = (values((len(slots), spec.num_kv_heads, dim), spec.dtype, layer) for _, dim in spec.planes)
            self.expected.write(StepArrays(slot_mapping=slots), layer, k, v)
        self.backend.import_blocks(range(32), self.expected.export_blocks(range(32)))
        tables = np.random.default_rng(0).permutation(32).astype(np.int32)[: 2 * (100 // spec.block_size + 1)]
        self.plan = StepArrays(tables.reshape(2, -1), np.array([100, 33]), np.cumsum([0, *q_lens]))
        self.options = AttentionOptions(**options) if options else None
        self.step = self.backend.prepare(self.plan)

    def q(self, seed):
        return values((int(self.plan.cu_q_lens[-1]), self.num_heads, self.spec.query_dim), self.spec.dtype, seed) / 8

    def attend(self, layer, q, repeat):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.backend._lazy, "repeat", repeat)
            return self.backend.attend(self.step, layer, q, options=self.options)

    def note(self, folder):
        """Attend for the first time, while MLX traces: without Metal it describes launches only then."""

        def traced(q):
            return self.attend(0, q, lambda layer, noted, own: own[0])

        mx.export_function(str(folder / "noted.mlxfn"), traced, self.q(0))

    def run(self, recorder, layer, noted, own):
        """Encode the node of a layer, run its launches by the stand-in, and return the result."""
        capsule, chain = self.backend._lazy._layers[layer]
        mx.eval(own)
        launches, _, _ = recorder.record(mx.array, chain.handles, own, capsule, None, None, noted, None, None)

        def access(name, is_output, address):
            is_pool = address in chain.addresses  # an output for the order of writes, but only read
            assert is_output == (is_pool or name == "out")
            return "output" if name == "out" else "read_only"

        for launch in launches:
            parameters = re.findall(r"(\w+)[*&] (\w+) \[\[buffer\((\d+)\)\]\]", launch[1])
            array = run_recorded(launch, [(int(i), name, NUMPY[dtype]) for dtype, name, i in parameters], access)
        shape = (*own[0].shape[:2], self.spec.result_dim)
        return mx.array(array.reshape(shape)).view(DTYPES[self.spec.dtype])


@pytest.fixture
def attending(recorder, built, tmp_path):
    def made(*case):
        found = Attending(*case)
        found.note(tmp_path)
        return found

    with looking_in(built), on_cpu():
        yield made


@pytest.mark.parametrize("name", ATTENDED)
def test_noted_attention_repeats_for_layers_what_the_cpu_kernels_compute(recorder, attending, name):
    """What MLX has described for one layer, with the arrays of the others."""
    case = attending(*ATTENDED[name])
    for layer in range(case.spec.num_layers):
        q = case.q(layer + 1)
        out = case.attend(layer, q, lambda *node: case.run(recorder, *node))
        expected = case.expected.attend(case.plan, layer, q, options=case.options)
        out, expected = np.array(out.astype(mx.float32)), np.array(expected.astype(mx.float32))
        limit = {"float32": 4e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[case.spec.dtype]
        np.testing.assert_allclose(out, expected, rtol=0, atol=limit * np.abs(expected).max())


def test_attention_is_one_node_for_each_layer_and_described_once_in_a_step(attending, monkeypatch):
    case = attending(*ATTENDED["parts and their sum"])  # outside of a trace MLX describes nothing without Metal
    q = case.q(1)
    for layer in range(3):
        out = case.backend.attend(case.step, layer, q)
        assert out.shape == q.shape and out.dtype == q.dtype
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        case.backend.attend(case.backend.prepare(case.plan), 0, q)
    with pytest.raises(RuntimeError, match="the node was built for a GPU"):
        mx.eval(out)


def test_a_node_takes_at_most_half_of_the_time_of_the_calls_that_it_repeats(attending, tmp_path):
    """Of the host, per layer: `attend` of a step whose contexts have parts. It is a quarter on x86."""
    case, times, kept = attending(*ATTENDED["parts and their sum"]), [], []

    def attend(q):
        taken = []
        for _ in range(40):
            begin = time.process_time_ns()
            kept.append([case.backend.attend(case.step, layer, q) for layer in range(3)])
            taken.append((time.process_time_ns() - begin) / 3e3)
        times.append(min(taken))
        return q

    attend(case.q(0))
    case.backend._notes = False
    mx.export_function(str(tmp_path / "described.mlxfn"), attend, case.q(0))
    print(f"{times[1]:.1f} us for each layer, {times[0]:.1f} us as a node")
    assert times[0] <= times[1] / 2


def test_what_cannot_be_repeated_is_refused(attending, tmp_path):
    """And leaves the pool as it was: its newest handles are those from before."""
    case = attending(*ATTENDED["heads apart"])
    lazy, q = case.backend._lazy, case.q(1)
    ((launch, _),) = next(iter(case.step.bound.values())).launches
    own = q, case.backend._kernels.layout(0), *per_head(None)
    with pytest.raises(TypeError, match="is not of a metal_kernel"):
        lazy.noted(0, lambda k, v: [q * 2], own)
    with pytest.raises(ValueError, match="another number of arrays than attention takes"):
        lazy.repeat(0, launch.noted[0], own[:2])
    with pytest.raises(ValueError, match=r"\[attend\] q must have shape \[T, Hq, D\]"):
        lazy.repeat(0, launch.noted[0], (q[0], *own[1:]))

    def traced(x):
        with pytest.raises(ValueError, match="more outputs, or sets them before"):
            lazy.noted(0, lambda *pools: launch.attend(inputs=[x] * 11, init_value=0.0), own)
        with pytest.raises(RuntimeError, match="q has no content yet"):
            lazy.repeat(0, launch.noted[0], (x, *own[1:]))
        return x

    mx.export_function(str(tmp_path / "refused.mlxfn"), traced, q)
    lazy.wait()


# ------------------------------------------------------------------------------------- command buffers

SMALL = KVSpec(1, 2, 64, "float16", 16)
# MLX ends a command buffer when it has more launches, or when these have bound more than 50 * 2**20 elements
# (`CommandEncoder::needs_commit`, on a Max or Ultra). A buffer counts once, by the `data_size` of what it is bound as.
LAUNCHES_MAX = MIB_MAX = 50
CONTEXT = 1024  # tokens, of one row
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MODELS = {  # with their layers
    "Llama 3.2 1B": (llama, 16, (2048, 8192, 32, 8, 64)),
    "Qwen3 4B": (qwen3, 36, (2560, 9728, 32, 8, 128)),
    "Llama 3.1 8B": (llama, 32, (4096, 14336, 32, 8, 128)),
    "Qwen3 32B": (qwen3, 64, (5120, 25600, 64, 8, 128)),
}
REST = {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 32, "rope_theta": 1e4}
REST |= {"max_position_embeddings": 2048, "tie_word_embeddings": False}
ALIASES = ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Transpose", "Broadcast", "Slice", "SliceUpdate")


def launches_of_layer(module, sizes):
    """What MLX binds in a layer of mlx-lm's model of 4 bits: of each primitive its name, and elements by buffer.

    Nothing is computed: MLX traces, with one operation in place of each that it launches as one kernel on a GPU.
    """
    block = module.TransformerBlock(module.ModelArgs.from_dict(REST | dict(zip(SIZES, sizes, strict=True))))
    nn.quantize(block, 64, 4)
    names, weights = zip(*tree_flatten(block.parameters()), strict=True)
    cache, told, buffers = KVCache(), [], {}

    def attend(q, k, v, **_):
        return mx.concatenate([x.flatten() for x in (q, k, v)])[: q.size].reshape(q.shape)

    def traced(x, keys, values, *weights):
        block.load_weights(list(zip(names, weights, strict=True)))
        cache.keys, cache.values, cache.offset = keys, values, CONTEXT - 1
        return block(x, None, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: x * weight)
        patch.setattr(mx.fast, "rope", lambda x, *_, **__: mx.exp(x))
        patch.setattr(module, "swiglu", lambda gate, x: gate * x)
        patch.setattr(module, "scaled_dot_product_attention", attend)
        keys, values = (mx.zeros((1, sizes[3], CONTEXT, sizes[4])) for _ in "kv")
        mx.export_function(told.append, traced, mx.zeros((1, 1, sizes[0])), keys, values, *weights)
    for one in (one for one in told if one["type"] == "primitive"):
        if one["name"] in ALIASES:
            (name, *_), (source, *_) = one["outputs"][0], one["inputs"][0]
            buffers[name] = buffers.get(source, source)
        if one["name"] not in ALIASES[:-1]:
            arrays = (*one["inputs"], *one["outputs"])
            yield one["name"], {buffers.get(name, name): math.prod(shape) for name, shape, _ in arrays}


def recorded_launches(recorder, case, plane, whole=False):
    """What the extension binds in a layer that writes and attends: elements by address, of a pool with such planes."""
    (capsule, chain), module = case.backend._lazy._layers[0], case.backend._module
    k, v = (mx.zeros((2, case.spec.num_kv_heads, dim), mx.bfloat16) for _, dim in case.spec.planes)
    step = module.step(1, 32, case.spec.block_size, np.array([3, 300]), 0, None, None, None)
    mx.eval(k, v)
    found, _, _ = recorder.record(mx.array, chain.handles, (), capsule, step, None, None, k, v)

    def attended(layer, noted, own):
        mx.eval(own)
        found.extend(recorder.record(mx.array, chain.handles, own, capsule, None, None, noted, None, None)[0])
        return own[0]

    case.attend(0, case.q(1), attended)
    for _, _, bindings, _, _ in found:
        arrays = [x[1:] for x in bindings.values() if not isinstance(x, bytes)]
        is_plane = {at: at in chain.addresses and (whole or 2 * counted == nbytes) for at, nbytes, counted in arrays}
        yield {at: plane if is_plane[at] else counted for at, _, counted in arrays}


def command_buffers(num_layers, launches):
    """How many MLX takes for a token."""
    count, bound, ops = 1, {}, 0
    for layer in range(num_layers):
        for launch in launches:
            ops, bound = ops + 1, {(layer, name): size for name, size in launch.items()} | bound
            if ops > LAUNCHES_MAX or sum(bound.values()) >> 20 > MIB_MAX:
                count, bound, ops = count + 1, {}, 0
    return count


@pytest.mark.parametrize("name", MODELS)
def test_a_large_pool_costs_no_command_buffers_and_a_planted_fault_does(recorder, attending, name):
    module, num_layers, sizes = MODELS[name]
    *_, heads, kv_heads, dim = sizes
    case = attending(KVSpec(1, kv_heads, dim, "bfloat16", 16), heads // kv_heads, (1, 1), {})
    layer = list(launches_of_layer(module, sizes))
    at = [kind for kind, _ in layer].index("Concatenate")
    two_passes = [launch for _, launch in (*layer[:at], layer[at], *layer[at:])]
    dense = command_buffers(num_layers, two_passes)
    for tokens in (32_768, 131_072):
        counts = []
        for whole in (False, True):  # planted: handles that count as what they are handles of
            paged = list(recorded_launches(recorder, case, tokens * kv_heads * dim, whole))
            assert len(paged) == 3  # a write, attention, the sum of its parts
            launches = [launch for kind, launch in layer if kind not in ("SliceUpdate", "Concatenate")]
            launches[at - 2 : at - 2] = paged  # behind one operation less for each of K and V
            counts.append(command_buffers(num_layers, launches))
        print(f"{name}, {tokens}: {len(two_passes)} launches a layer, {dense} dense, {counts} with the extension")
        assert counts[0] <= dense + 1 < counts[1]


def test_attention_binds_a_pool_that_is_scattered_by_its_first_elements():
    backend, bound = MLXBackend(SMALL, NUM_BLOCKS, native=False, metal_kernel=mx.fast.metal_kernel), []
    backend._on_pool(0, lambda *sides: bound.extend(plane.size for side in sides for plane in side))
    assert bound == [8, 8]
