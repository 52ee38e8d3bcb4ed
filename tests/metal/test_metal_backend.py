"""`MetalBackend` and `NativeMetalBackend`, dense and packed: the kit, chunks of both kinds, order, warmup, the choice.

On Linux Metal is what the tests stand in for it; where there is a Mac, the same tests run on it.
"""

import dataclasses
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_engine import recording
from mlx_families import FAMILIES
from mlx_models import VOCAB, batch_tokens, on_cpu, random_prompts, solo_tokens, tiny_llama
from test_mlx_native import looking_in

import kvpool_backends.mlx
from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import attention, install
from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool.protocol import AttentionOptions, BatchShape, StepArrays
from kvpool.testing import conformance
from kvpool.testing import filled as kit
from kvpool.testing.conformance import check_scores
from kvpool.testing.filled import fill
from kvpool_backends.mlx import MLXBackend, metal_kernels
from kvpool_backends.mlx import metal as metal_route

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=8)
FUSED = dataclasses.replace(SPEC, head_dim=64)  # for MLX's attention
PACKED = KVSpec(2, 2, 64, "float32", 8, k_bits=8, v_bits=4, quant_group_size=32)
SPECS = pytest.mark.parametrize("spec", [FUSED, PACKED], ids=["dense", "packed"])
PACKED_CASES = [
    conformance.groups_of_every_kind_are_stored_by_the_formula,
    conformance.quantized_contexts_equal_dense_attention,
    conformance.exported_blocks_hold_the_documented_bytes,
    conformance.copies_take_exactly_the_valid_tokens,
    conformance.import_restores_what_export_took,
    conformance.compaction_moves_what_stays_and_nothing_else,
]
# Of the kit, what says something about this class: the kernels have tests of their own, and each launch takes its time.
CASES = (
    "protocol_is_implemented",
    "ragged_chunks_equal_dense_attention",
    "plans_of_int64_are_read_like_int32",
    "layouts_are_strides_only",
    "unused_slots_never_matter",
    "padding_is_inert",
    "copies_writes_reads_happen_in_order",
    "zero_clears_only_what_it_names",
    "warmup_changes_nothing",
    "misuse_is_refused_before_a_byte_changes",
    "refused_specs_raise",
    "slots_behind_the_window_never_matter",
    "sinks_are_counted_once",
    "masks_of_bools_and_floats_are_applied",
    "ends_of_the_float_range_are_numbers_like_others",
    pytest.param("scores_beside_masks_of_the_float_range_are_finite", marks=pytest.mark.long),
    "options_that_cannot_be_served_are_refused",
    "scores_that_cannot_be_served_are_refused",
    pytest.param("groups_equal_dense_attention", marks=pytest.mark.long),
    "gaps_in_tables_are_not_read",
    "latents_are_stored_and_read",
)
NATIVE_CASES = (
    "plans_of_int64_are_read_like_int32",
    "copies_writes_reads_happen_in_order",
    "misuse_is_refused_before_a_byte_changes",
    "import_restores_what_export_took",
    "padding_is_inert",
    "gaps_in_tables_are_not_read",
)


@pytest.fixture
def metal(engine):
    """A factory of backends that scatter, with kernels of the engine."""
    return lambda spec, num_blocks: MLXBackend(spec, num_blocks, native=False, metal_kernel=engine.factory(1))


@pytest.fixture
def native_metal(engine, built):
    """The same with writes by the extension; where there is no Metal, by its nodes on the CPU."""
    with looking_in(built):
        yield lambda spec, num_blocks: MLXBackend(spec, num_blocks, native=True, metal_kernel=engine.factory(1))


@pytest.fixture(params=["metal", "native_metal"])
def make(request, engine):
    return request.getfixturevalue(request.param)


def run_case(name, make):
    (case,) = [case for case in conformance.CASES if case.__name__ == name]
    case(make)


@pytest.mark.parametrize("name", CASES)
def test_metal_backend_conforms(name, metal):
    run_case(name, metal)


@pytest.mark.parametrize("name", NATIVE_CASES)
def test_native_metal_backend_conforms(name, native_metal):
    run_case(name, native_metal)


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.__name__)
def test_packed_pools_conform(case, metal, monkeypatch):
    # Each kernel takes half a second to compile: two specs of all.
    real, few = kit.quantized_specs, (("float32", (8, 4)), ("float16", (4, 4)))
    for module in (conformance, kit):
        monkeypatch.setattr(module, "quantized_specs", lambda *a: (x for x in real(*a) if (x.dtype, x.bits) in few))
    case(metal)


# ------------------------------------------------------------------------------------------ long chunks


@pytest.fixture
def gathers(monkeypatch):
    """Contexts that were gathered for MLX's own attention, each K and V."""
    seen = []
    gather = metal_route.MetalKernels.gather
    monkeypatch.setattr(metal_route.MetalKernels, "gather", lambda self, *a: (seen.append(a[-1]), gather(self, *a))[1])
    return seen


@pytest.mark.parametrize(("q_lens", "chunks"), [((1, 40, 3, 70, 32), 2), ((32, 1), 0), ((40, 0, 50), 2)], ids=str)
def test_long_chunks_take_mlx_attention_and_equal_float64(make, gathers, q_lens, chunks):
    filled = fill(make, FUSED, [n + 9 for n in q_lens])
    filled.check(q_lens, 4, f"chunks {q_lens}")
    assert len(gathers) == 2 * chunks * SPEC.num_layers


@pytest.mark.parametrize("kind", ["raw", "mass"])
@SPECS
def test_scores_of_long_chunks_equal_float64(make, kind, spec):
    filled = fill(make, spec, [n + 9 for n in (1, 40, 0, 7, 32)])
    for options in (None, AttentionOptions(sinks=np.linspace(-1, 2, 4))):
        check_scores(filled, (1, 40, 0, 7, 32), 4, kind, options)


@SPECS
def test_long_chunks_with_sinks_equal_float64_and_other_options_stay_in_the_kernel(metal, gathers, spec):
    filled = fill(metal, spec, [50, 20])
    sinks = AttentionOptions(sinks=np.array([0.5, -1.0, 2.0, 0.0]))
    filled.check((40, 1), 4, "sinks", options=sinks, tolerance=2e-5)
    assert len(gathers) == 2 * SPEC.num_layers
    for options in (AttentionOptions(window=5), AttentionOptions(soft_cap=2.0, alibi_slopes=np.ones(4) / 8)):
        filled.check((40, 1), 4, "options", options=options, tolerance=2e-5)
    assert len(gathers) == 2 * SPEC.num_layers


def test_padding_tokens_beside_long_chunks_are_zero(make):
    filled = fill(make, FUSED, [50, 60])
    plan, q = filled.plan((40, 50)), filled.queries((40, 50), 4)
    padded = mx.array(np.concatenate([q, np.ones((3, 4, 64))]).astype(np.float32))
    out = np.array(filled.backend.attend(filled.backend.prepare(plan), 0, padded))
    np.testing.assert_allclose(out[:90], filled.expected(0, q, (40, 50)).out, atol=1e-5)
    assert (out[90:] == 0).all()


MIB = 2**20
DIMS = (*((dim, dim) for dim in (64, 72, 80, 96, 112, 128, 192, 256, 512)), (192, 128), (64, 128))
#: Head dimensions for which MLX makes no array of all scores: by release and GPU, the last with tensor operations.
FUSED_DIMS = (64, 72, 80, 96, 128)
FUSED_BY_MLX = {("0.31.2", "g17s"): (64, 80, 128), ("0.32.1", "g17s"): FUSED_DIMS, ("0.33.0rc1", "g16s"): FUSED_DIMS}
FUSED_BY_MLX |= {("0.32.4.dev1+a", "g17s"): (*FUSED_DIMS, 256)}


@pytest.mark.parametrize(("release", "gpu"), FUSED_BY_MLX)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_no_array_of_a_long_chunk_is_larger_than_256_mib(monkeypatch, dim, v_dim, release, gpu):
    """A chunk of 2,048 queries of 16 heads behind 128k tokens: what is launched, and the scores that MLX would make."""
    sizes, gathered, is_fused = [], [], dim == v_dim and dim in FUSED_BY_MLX[release, gpu]
    monkeypatch.setattr(mx, "__version__", release)
    monkeypatch.setattr(metal_route, "has_metal", lambda: True)
    monkeypatch.setattr(metal_route.platform, "mac_ver", lambda: ("26.3", (), ""))
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": f"applegpu_{gpu}"})

    def factory(**_):
        def launch(*, output_shapes, output_dtypes, **_):
            sizes.extend(np.prod(shape) * dtype.size for shape, dtype in zip(output_shapes, output_dtypes, strict=True))
            return [mx.zeros(*out) for out in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    def attention(q, k, v, **_):
        gathered.append(k)
        if not is_fused:
            sizes.append(q.shape[1] * q.shape[2] * k.shape[2] * q.dtype.size)
        return mx.zeros((*q.shape[:3], v.shape[3]), q.dtype)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    context, spec = 2**17, KVSpec(1, 2, dim, "float16", 16, v_dim)
    backend = MLXBackend(spec, 4, native=False, metal_kernel=factory)
    plan = StepArrays(np.zeros((1, context // 16), np.int32), np.array([context]), np.array([0, 2048]))
    backend.attend(backend.prepare(plan), 0, mx.zeros((2048, 16, dim), mx.float16))
    assert max(sizes) <= 256 * MIB
    assert len(gathered) == is_fused


# ---------------------------------------------------------------------------------- steps, and their order


def step(backend, block, value):
    """Arrays of a step that writes and reads 8 tokens in one block; K and V are `value`."""
    slots = np.arange(8, dtype=np.int32) + block * 8
    plan = StepArrays(np.int32([[block]]), np.int32([8]), np.int32([0, 8]), slots)
    x = mx.full((8, 2, 8), float(value))
    return backend.prepare(plan), x


def test_layers_of_a_step_share_one_work_list(make, monkeypatch):
    planned = []
    plan_attention = metal_route.plan_attention
    monkeypatch.setattr(metal_route, "plan_attention", lambda *a, **k: (planned.append(1), plan_attention(*a, **k))[1])
    backend = make(SPEC, 4)
    arrays, x = step(backend, 1, 1.0)
    for layer in range(2):
        backend.write(arrays, layer, x, x)
        np.testing.assert_allclose(backend.attend(arrays, layer, x), 1.0, rtol=1e-6)
        for sinks in ([0.0, 0.0], [1.0, 1.0]):
            out = backend.attend(arrays, layer, x, options=AttentionOptions(sinks=np.array(sinks)))
            assert (np.array(out) < 1.0).all()
    assert len(planned) == 1


ALIKE = {
    "plain": [None, None],
    "sinks": [AttentionOptions(window=5, sinks=np.zeros(2)) for _ in range(2)],
    "slopes": [AttentionOptions(soft_cap=5.0, alibi_slopes=np.ones(2)) for _ in range(2)],
}


@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_layers_after_the_first_upload_nothing_and_call_little(monkeypatch, options):
    """What a layer costs on the host, in calls: Python's own and those of C, the kernel's apart.

    Each layer has sinks and slopes of its own.
    """
    result = mx.zeros((8, 2, 8))
    backend = MLXBackend(SPEC, 4, native=False, metal_kernel=lambda **_: lambda **_: [result])
    for layer in (0, 1):
        arrays, x = step(backend, 1, 1.0)
        backend.attend(arrays, layer, x, options=options[layer])
    arrays, x = step(backend, 1, 1.0)
    backend.attend(arrays, 0, x, options=options[0])
    calls = []

    def count(frame, event, what):
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else what)

    sys.setprofile(count)
    try:
        backend.attend(arrays, 1, x, options=options[1])
    finally:
        sys.setprofile(None)
    assert mx.array not in calls and np.array not in calls
    assert len(calls) <= 24, calls  # four of them are slices of the planes


def test_sinks_of_a_layer_are_read_once(monkeypatch):
    """To read a parameter is to wait for everything that MLX computes."""
    reads = []
    real = np.array
    monkeypatch.setattr(attention.np, "array", lambda *a, **k: (reads.append(1), real(*a, **k))[1])
    sinks, others = mx.array([0.5, 1.0]), mx.array([0.5, 1.0])
    first = [attention._options(window, None, sinks) for window in (None, 8, None, 8)]
    assert first[0] is first[2] is not first[1] is first[3] and len(reads) == 2
    assert attention._options(None, None, others) is not first[0]
    assert first[0].sinks.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_install_compiles_the_kernels_of_all_lengths(engine, monkeypatch, name):
    """A request after `install` builds nothing: not a longer context, not a longer chunk, not one query."""
    monkeypatch.setattr(metal_route.MetalAttention, "part_tokens", 32)
    kernels = set()
    factory = recording(engine.factory(0), kernels)
    make = MLXBackend
    monkeypatch.setattr(
        kvpool_backends.mlx, "MLXBackend", lambda spec, n, **_: make(spec, n, native=False, metal_kernel=factory)
    )
    model = (FAMILIES | {"deepseek_v3": tiny_deepseek})[name]()
    with install(model, 60, block_size=8, fused=True):
        warm = frozenset(kernels)
        assert len(warm) >= 4
        for prompt in random_prompts((3, 70, 33)):
            solo_tokens(model, prompt, 3)
    assert not kernels - warm


def test_a_result_is_that_of_its_own_step_whatever_is_built_and_evaluated_later(make):
    backend = make(SPEC, 4)
    outs = []
    for value in range(4):
        arrays, x = step(backend, 1, value)
        backend.write(arrays, 0, x, x)
        outs.append((backend.attend(arrays, 0, x), *backend.read(arrays, 0)))
    for value, results in reversed(list(enumerate(outs))):
        for x in results:
            np.testing.assert_allclose(x, value, rtol=1e-6)


def test_a_step_without_queries_is_good_for_writes(make):
    backend = make(SPEC, 4)
    slots = np.arange(8, 16, dtype=np.int32)
    arrays = backend.prepare(StepArrays(np.int32([[1]]), np.array([8]), np.zeros(2, int), slots))
    x = mx.full((8, 2, 8), 2.0)
    backend.write(arrays, 0, x, x)
    np.testing.assert_array_equal(backend.gather(0, [1])[0], 2.0)
    assert not np.array(backend.attend(arrays, 0, x)).any()


def test_contexts_of_empty_rows_are_empty(metal):
    backend = metal(SPEC, 4)
    empty = backend.prepare(StepArrays(np.zeros((2, 1), np.int32), np.zeros(2, int), np.zeros(3, int)))
    assert [x.shape for x in backend.read(empty, 0)] == [(2, 2, 0, 8), (2, 2, 0, 8)]


# ------------------------------------------------------------------------------------------------- warmup


@pytest.mark.parametrize(
    ("spec", "options", "scores"),
    [
        (SPEC, None, None),
        (SPEC, None, "raw"),
        (SPEC, AttentionOptions(soft_cap=3.0, sinks=np.zeros(8), window=9), None),
        (PACKED, None, None),
    ],
)
def test_after_warmup_no_kernel_is_new(engine, monkeypatch, spec, options, scores):
    monkeypatch.setattr(metal_route.MetalAttention, "part_tokens", 32)
    kernels = set()
    factory = recording(engine.factory(0), kernels)
    filled = fill(lambda *a: MLXBackend(*a, native=False, metal_kernel=factory), spec, [3, 60, 40])
    kernels.clear()
    filled.backend.warmup([BatchShape(4, 64, 8, 8)], [] if options is None else [options], scores=scores)
    warm = frozenset(kernels)
    assert len(warm) >= 4
    for q_lens in ((1, 1, 1), (2, 1, 1), (3, 1, 20), (1, 60, 1), (3, 50, 33), (0, 0, 1)):
        filled.check(q_lens, 8, f"{q_lens}", options=options, tolerance=2e-5)
        if scores is not None:
            check_scores(filled, q_lens, 8, scores, options)
    new = kernels - warm
    assert not new, "\n".join(map(str, new))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_extension_writes_packed_planes_where_they_are_read(native_metal, layout):
    spec = dataclasses.replace(PACKED, layout=layout, v_bits=None)
    filled = fill(native_metal, spec, [3, 50, 40])
    assert type(filled.backend).__name__ == "NativeMetalBackend"
    for q_lens in ((1, 1, 1), (3, 40, 9)):
        filled.check(q_lens, 4, f"{q_lens}", tolerance=2e-5)
    assert filled.backend.settle() == filled.backend.pool_copies == 0


def test_reads_of_packed_planes_give_what_gather_gives(metal):
    filled = fill(metal, PACKED, [20, 9])
    read = filled.backend.read(filled.backend.prepare(filled.plan((1, 1))), 1)
    for row, n in enumerate((20, 9)):
        for x, whole in zip(read, filled.backend.gather(1, filled.tables[row, : -(-n // 8)], n), strict=True):
            assert x.shape == (2, 2, 20, 64) and not x[row, :, n:].any()
            np.testing.assert_allclose(np.array(x[row, :, :n].swapaxes(0, 1)), np.array(whole), rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------- the choice of route


def test_the_metal_route_is_chosen_and_refused_with_reasons(engine, monkeypatch):
    with on_cpu():
        factory = engine.factory(0)
        backend = MLXBackend(SPEC, 4, metal_kernel=factory)
        assert (backend.route, backend.capabilities.lazy) == ("metal", True) and "route='metal'" in repr(backend)
        assert MLXBackend(SPEC, 4, kernels=False, metal_kernel=factory).route == "plain"
        with pytest.raises(ValueError, match=r"block_size 4 is not among .* by the metal route"):
            MLXBackend(dataclasses.replace(SPEC, block_size=4), 4, metal_kernel=factory)
        monkeypatch.setattr(kvpool_backends.mlx, "has_metal", lambda: True)
        monkeypatch.setattr(mx.fast, "metal_kernel", factory)
        assert MLXBackend(SPEC, 4, native=False).route == "metal"
        small = dataclasses.replace(SPEC, block_size=4)
        assert MLXBackend(small, 4, native=False).route == "plain"
        with pytest.raises(BackendUnavailable, match="kernels=True, but block_size 4 is not among"):
            MLXBackend(small, 4, kernels=True, native=False)


def test_a_quantized_pool_takes_the_extension_where_there_is_one(engine, built):
    factory = engine.factory(0)
    with looking_in(built), on_cpu():
        assert type(MLXBackend(PACKED, 4, metal_kernel=factory)).__name__ == "NativeMetalBackend"
        assert type(MLXBackend(PACKED, 4, metal_kernel=factory, native=False)).__name__ == "MetalBackend"
        assert type(MLXBackend(PACKED, 4)).__name__ == "NativeBackend"
        assert MLXBackend(PACKED, 4, kernels=False).route == "plain"
        with pytest.raises(ValueError, match=r"layout 'HND' is not among .* by the metal route"):
            MLXBackend(KVSpec(1, 2, 64, layout="HND", k_bits=8), 4, native=False, metal_kernel=factory)


@SPECS
@pytest.mark.parametrize("version", ["0.31.2", "1.0.32"])
def test_another_mlx_must_pass_a_self_check_on_every_route(engine, built, monkeypatch, caplog, version, spec):
    monkeypatch.setattr(kvpool_backends.mlx, "MLX_VERSION", version)
    factory = engine.factory(0)
    routes = ({"metal_kernel": factory}, {"kernels": True}, {"kernels": False})
    with on_cpu(), looking_in(built):
        for options in (*({"native": False} | route for route in routes), {"native": True}):
            kvpool_backends.mlx.what_is_wrong.cache_clear()
            caplog.clear()
            backend = MLXBackend(spec, 4, **options)
            assert f"MLX {version} is untested, the {backend.route} route has passed" in caplog.text
            caplog.clear()
            MLXBackend(spec, 4, **options)
            assert not caplog.text
    kvpool_backends.mlx.what_is_wrong.cache_clear()


def test_a_gpu_without_the_extension_says_once_what_it_costs(engine, monkeypatch, caplog):
    found = {"active": False, "why": "not built", "command": "make it"}
    monkeypatch.setattr(kvpool_backends.mlx, "status", lambda: found)
    for on_gpu, said in ((False, 0), (True, 1)):
        monkeypatch.setattr(kvpool_backends.mlx, "has_metal", lambda on_gpu=on_gpu: on_gpu)
        kvpool_backends.mlx._say_what_scatters_cost.cache_clear()
        for _ in range(2):
            MLXBackend(SPEC, 4, native=False, metal_kernel=engine.factory(0))
        assert caplog.text.count("steps queue up (not built): make it") == said
    kvpool_backends.mlx._say_what_scatters_cost.cache_clear()


def test_another_mlx_that_computes_or_packs_otherwise_is_refused(engine, monkeypatch):
    monkeypatch.setattr(kvpool_backends.mlx, "MLX_VERSION", "0.33.0")
    kvpool_backends.mlx.what_is_wrong.cache_clear()

    def wrong(**description):
        kernel = engine.factory(0)(**description)
        return lambda **call: [x * 1.001 for x in kernel(**call)]

    def gone(**description):
        raise TypeError("metal_kernel has no argument 'name'")

    for factory, why in (
        (wrong, r"MLX 0.33.0 .* metal route .*\(attention is wrong by .*mlx 0.32.x"),
        (gone, r"\(TypeError: metal_kernel has no argument"),
    ):
        with pytest.raises(BackendUnavailable, match=why):
            MLXBackend(SPEC, 4, native=False, metal_kernel=factory)
    quantize = mx.quantize
    monkeypatch.setattr(mx, "quantize", lambda *x: [quantize(*x)[0] ^ 1, *quantize(*x)[1:]])
    with on_cpu():
        assert MLXBackend(SPEC, 4, kernels=False).route == "plain"
        with pytest.raises(BackendUnavailable, match=r"plain route .*\(attention is wrong by"):
            MLXBackend(PACKED, 4, kernels=False)
    monkeypatch.undo()
    kvpool_backends.mlx.what_is_wrong.cache_clear()
    assert MLXBackend(SPEC, 4, native=False, metal_kernel=engine.factory(0)).route == "metal"


def test_a_compiler_without_products_of_mixed_types_gets_floats(engine, monkeypatch, caplog):
    """Of half or bfloat with float, which Apple's may refuse: kernels that multiply floats alone take their place."""
    spec, texts = KVSpec(1, 1, 64, "bfloat16", 8), []

    def without(**description):
        kernel = engine.factory(0)(**description)

        def launch(**call):
            if ("WIDEN", False) in call["template"]:
                raise RuntimeError("no matching function for simdgroup_multiply_accumulate")
            texts.append(description["name"])
            return kernel(**call)

        return launch

    monkeypatch.setattr(metal_kernels.MetalKernels, "widen", False)
    monkeypatch.setattr(kvpool_backends.mlx, "has_metal", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", without)
    kvpool_backends.mlx.what_is_wrong.cache_clear()
    for _ in range(2):
        assert MLXBackend(spec, 4, native=False).route == "metal"
    assert caplog.text.count("matrices of floats alone are taken, because of: RuntimeError: no matching") == 1
    assert any("paged_matrix" in name for name in texts)
    fill(lambda *a: MLXBackend(*a, native=False), spec, [30]).check((5,), 4, "wide", tolerance=2e-2)
    kvpool_backends.mlx.what_is_wrong.cache_clear()


def test_an_extension_whose_attention_fails_lets_mlx_launch_each_layer(engine, built, caplog):
    with on_cpu(), looking_in(built):
        from kvpool_backends.mlx.native.backend import NativeMetalBackend

        class Route(NativeMetalBackend):
            def _launched(self, *call):
                if not self.describes_each:
                    raise RuntimeError("no such pipeline")
                return super()._launched(*call)

        for _ in range(2):
            assert kvpool_backends.mlx.what_is_wrong(Route, engine.factory(0), FUSED) == ""
    assert Route.describes_each and not metal_kernels.MetalKernels.widen
    assert caplog.text.count("described to MLX for each layer, because of: RuntimeError: no such pipeline") == 1


def test_only_commands_wire_memory_down():
    """A limit of the process, which belongs to its owner."""
    root = Path(__file__).parents[2]
    paths = [path for folder in ("kvpool", "kvpool_backends") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in paths if "set_wired_limit" in path.read_text()] == ["wired.py"]


# ------------------------------------------------------------------------------------------------- mlx-lm


def tiny_deepseek():
    """Latent attention of 512 + 64 elements, as in DeepSeek-V3."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
    model = tiny_families.build("deepseek_v3", tiny_families.config_of("deepseek_v3") | sizes)
    tiny_families.randomize(model)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_fused_tokens_of_mlx_lm_equal_stock(make, monkeypatch, name):
    model, prompts = (FAMILIES | {"deepseek_v3": tiny_deepseek})[name](), random_prompts((3, 40, 9))
    stock = [solo_tokens(model, prompt, 5) for prompt in prompts]
    monkeypatch.setattr(kvpool_backends.mlx, "MLXBackend", lambda spec, num_blocks, **_: make(spec, num_blocks))
    with install(model, 60, block_size=8, fused=True) as kv:
        assert kv.passes.is_fused and kv.backend.route == "metal"
        assert batch_tokens(model, prompts, 5) == stock
    with install(model, 60, block_size=8, fused=False) as kv:
        assert not kv.passes.is_fused and solo_tokens(model, prompts[1], 5) == stock[1]
    assert kv.settle() == kv.summary().mlx_pool_copies == 0


def test_packed_pools_generate_what_they_do_with_the_kernels_of_the_cpu(metal, monkeypatch):
    with on_cpu():
        model, prompts = tiny_llama(head_dim=64), random_prompts((3, 40, 9))
        with install(model, 40, block_size=8, k_bits=8, v_bits=4) as kv:
            assert kv.backend.route == "kernels"
            expected = batch_tokens(model, prompts, 5)
        monkeypatch.setattr(kvpool_backends.mlx, "MLXBackend", lambda spec, n, **_: metal(spec, n))
        with install(model, 40, block_size=8, k_bits=8, v_bits=4, fused=True) as kv:
            assert kv.backend.route == "metal" and kv.backend.spec.bits == (8, 4)
            assert batch_tokens(model, prompts, 5) == expected
        assert kv.settle() == kv.summary().mlx_pool_copies == 0
