"""`BlockStore`: memory that is not its own, inputs of every kind, scratch, threads, processes, environment."""

import os
import subprocess
import sys
import textwrap
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.errors import ConcurrentUse
from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention, round_to
from kvpool_backends.cpu import BlockStore, isas, read_sum

SEED = 20_261
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def make(spec, num_blocks, **options):
    arrays = [np.zeros(shape, NUMPY[spec.dtype]) for shape, _, _ in spec.base_arrays(num_blocks)]
    return BlockStore(spec, num_blocks, arrays, **options)


class Case:
    """A store with two rows of known tokens: 2 queries in 37, 12 in 70; and 2 tokens of padding."""

    seq_lens, q_lens = (37, 70), (2, 12)

    def __init__(self, spec=None, **options):
        self.spec = spec or KVSpec(2, 2, 16, "float32", 8)
        rng = np.random.default_rng(SEED)
        self.store = make(self.spec, 20, **options)
        order = rng.permutation(np.arange(1, 20))
        self.tables = np.stack([np.append(order[:5], [-1] * 4), order[5:14]]).astype(np.int32)
        self.unused = int(order[-1])
        self.k, self.v = (
            [rng.standard_normal((n, self.spec.num_kv_heads, dim)).astype(np.float32) for n in self.seq_lens]
            for _, dim in self.spec.planes
        )
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            position = np.arange(len(k))
            slots = table[position // 8] * 8 + position % 8
            self.store.write(1, k, v, slots)
        self.q = rng.standard_normal((16, 4, self.spec.head_dim)).astype(np.float32)
        self.lens, self.sums = np.array(self.seq_lens, np.int32), np.array([0, 2, 14], np.int32)

    def attend(self, out=None, **changes):
        out = np.full((16, 4, self.spec.value_head_dim), np.nan, np.float32) if out is None else out
        arguments = {"q": self.q, "block_tables": self.tables, "seq_lens": self.lens, "cu_q_lens": self.sums}
        self.store.attend(1, out=out, **arguments | changes)
        return out

    def expected(self):
        rows = [dense_attention(self.q[i:j], self.k[n], self.v[n])[0] for n, (i, j) in enumerate([(0, 2), (2, 14)])]
        return np.concatenate([*rows, np.zeros((2, 4, self.spec.value_head_dim))])


# ---------------------------------------------------------------------- memory that somebody else owns


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((6, 2048), np.uint8)[:5, :768], r"has 3840 bytes in elements of 1, it must have 7680"),
        (np.zeros(7680, np.uint8), r"arrays\[0\] must have shape \[5, 1536\] and contiguous rows"),
        (np.zeros((10, 768), np.uint8), r"arrays\[0\] must have shape \[5, 1536\] and contiguous rows"),
        (np.zeros((1536, 5), np.uint8).T, r"arrays\[0\] must have shape \[5, 1536\] and contiguous rows"),
        (np.zeros((5, 1537), np.uint8)[:, :1536], r"has a row every 1537 bytes, it must be a multiple of 2"),
        (np.lib.stride_tricks.as_strided(np.zeros(7680, np.uint8), (5, 1536), (1024, 1)), r"at least 1536"),
        (np.zeros((5, 1538), np.uint8)[:, 1:-1], r"arrays\[0\] must be aligned to its elements of 2 bytes"),
    ],
)
def test_rows_that_cannot_hold_blocks_are_refused(rows, message):
    with pytest.raises(ValueError, match=r"\[BlockStore\] " + ".*" + message):
        BlockStore(KVSpec(3, 2, 8, "float16", 8, layout="block"), 5, [rows])


def test_store_works_in_place_on_anything_with_a_buffer_and_holds_it():
    blocks = [bytearray(4 * 2 * 4 * 3) for _ in range(2)]
    store = BlockStore(KVSpec(1, 1, 4, "float32", 2), 3, [memoryview(block).cast("f") for block in blocks])
    assert store.addresses() == [np.frombuffer(block, np.uint8).ctypes.data for block in blocks]
    tokens = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    store.write(0, memoryview(tokens), tokens + 1, memoryview(np.array([3])))
    for first, block in enumerate(blocks):
        assert np.frombuffer(block, np.float32).reshape(6, 4)[3].tolist() == [first, first + 1, first + 2, first + 3]
    with pytest.raises(BufferError):
        blocks[0].append(0)  # it cannot move as long as the store lives
    del store
    blocks[0].append(0)


# ---------------------------------------------------------------------- inputs of every kind


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("how", ["contiguous", "columns apart", "rows apart", "backwards", "transposed"])
def test_integers_of_any_width_and_stride_are_read(width, how):
    case = Case()

    def laid_out(x):
        x = x.astype(width)
        if how == "columns apart":
            return np.repeat(x, 2, axis=-1)[..., ::2]
        if how == "rows apart":
            return np.repeat(x, 2, axis=0)[::2]
        if how == "backwards":
            return np.ascontiguousarray(np.flip(x))[(slice(None, None, -1),) * x.ndim]
        return np.asfortranarray(x) if how == "transposed" else x

    changes = {"block_tables": laid_out(case.tables), "seq_lens": laid_out(case.lens), "cu_q_lens": laid_out(case.sums)}
    assert np.array_equal(case.attend(**changes), case.attend())
    np.testing.assert_allclose(case.attend(**changes), case.expected(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", list(NUMPY))
def test_queries_and_results_may_have_any_dtype_and_stride(dtype, isa):
    case = Case(isa=isa)
    bits = case.q.view(np.uint32) & 0xFFFF0000  # bfloat16 and, in this range, float16 hold the upper bits exactly
    case.q = bits.view(np.float32)
    q = (bits >> 16).astype(np.uint16) if dtype == "bfloat16" else case.q.astype(NUMPY[dtype])
    plain = case.attend()
    outs = {
        "contiguous": np.empty((16, 4, 16), np.float32),
        "head-major": np.empty((4, 16, 16), np.float32).swapaxes(0, 1),
        "gaps": np.empty((33, 9, 33), np.float32)[1::2, 1::2, 1::2],
        "backwards": np.empty((16, 4, 16), np.float32)[::-1, ::-1, ::-1],
    }
    wide = np.zeros((33, 9, 33), q.dtype)
    wide[1::2, 1::2, 1::2] = q
    for name, out in outs.items():
        for given in (q, wide[1::2, 1::2, 1::2], np.ascontiguousarray(q.swapaxes(0, 1)).swapaxes(0, 1)):
            assert np.array_equal(case.attend(out, q=given), plain), name
    half = case.attend(np.empty((16, 4, 16), np.float16))
    assert np.array_equal(half, plain.astype(np.float16))
    brain = case.attend(np.empty((16, 4, 16), np.uint16))
    assert np.array_equal((brain.astype(np.uint32) << 16).view(np.float32), round_to(plain, "bfloat16"))


@pytest.mark.parametrize("num_queries", [2, 9])  # decode and a chunk
def test_tokens_more_than_two_to_the_31_elements_apart_are_found(num_queries):
    """Queries, results, masks, keys and values of tokens that far apart; memory that is never touched costs nothing."""
    stride = 2**31 // (num_queries - 1)

    def far(array):
        memory = np.zeros((num_queries - 1) * stride + array[0].size, array.dtype)
        strides = (stride * array.itemsize, *array.strides[1:])
        view = np.lib.stride_tricks.as_strided(memory, array.shape, strides)
        view[:] = array
        return view

    rng = np.random.default_rng(SEED)
    store = make(KVSpec(1, 2, 16, "float16", 8), 4)
    q, k, v = rng.standard_normal((3, num_queries, 2, 16)).astype(np.float16)
    mask = rng.standard_normal((num_queries, 2, num_queries)).astype(np.float32)
    expected = dense_attention(q, k, v, None, AttentionOptions(mask=mask))[0]
    out = far(np.full_like(q, np.nan))
    store.write(0, far(k), far(v), 8 + np.arange(num_queries))
    ends = np.array([0, num_queries])
    store.attend(0, far(q), out, np.array([[1, 2]]), ends[1:], ends, options=AttentionOptions(mask=far(mask)))
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-3)


def test_padding_of_a_row_without_queries_is_not_looked_at():
    case = Case()
    plain = case.attend()
    tables = np.vstack([case.tables, np.full((3, 9), -7, np.int32)])
    lens, sums = np.array([37, 70, 0, 500], np.int32), np.array([0, 2, 14, 14, 14], np.int32)
    assert np.array_equal(case.attend(block_tables=tables, seq_lens=lens, cu_q_lens=sums), plain)


def test_empty_batches_are_answered():
    case = Case()
    none, nothing = np.zeros(0, np.int32), np.zeros(1, np.int32)
    out = case.attend(block_tables=np.zeros((0, 0), np.int32), seq_lens=none, cu_q_lens=nothing)
    assert not out.any()
    case.attend(np.zeros((0, 4, 16), np.float32), q=case.q[:0], seq_lens=none, cu_q_lens=nothing)
    case.store.write(0, case.q[:0, :2], case.q[:0, :2], none)
    case.store.zero(none)
    case.store.copy_blocks(np.zeros((0, 3), np.int64))
    case.store.gather(0, none, np.zeros((0, 2, 16), np.float32), np.zeros((0, 2, 16), np.float32))


# ---------------------------------------------------------------------- scratch, threads, processes


def grown(step, times):
    """Bytes that Python holds more after so many steps, once its free lists have taken in what they leave."""
    tracemalloc.start()
    held = []
    for _ in range(2):
        for _ in range(times):
            step()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return held[1] - held[0]


def test_calls_allocate_nothing_once_the_scratch_has_grown():
    case = Case()
    options = AttentionOptions(mask=np.ones((16, 75), bool), sinks=np.zeros(4))
    tables, out, ids = case.tables.astype(np.int64), np.empty((16, 4, 16), np.float32), np.arange(3)
    k, copies = np.ones((8, 2, 16), np.float32), np.array([[1, 2, 3]])
    rows, scores = np.empty((3, case.spec.block_nbytes), np.uint8), np.empty((2, 2, 70), np.float32)

    def step():
        case.store.copy_blocks(copies)
        case.store.write(0, k, k, ids[0] + np.arange(8))
        case.attend(out, block_tables=tables, options=options)
        case.store.gather(0, ids, k, k.copy())
        case.store.export_blocks(ids, rows)

        for kind in ("raw", "mass"):
            case.attend(out, scores=kind, scores_out=scores)

    step()
    scratch = case.store.scratch_nbytes
    assert 0 < scratch < 2**22
    left = grown(step, 200)
    assert left < 200 * 32, f"{left} bytes in 200 steps: an object is left behind by each"
    assert case.store.scratch_nbytes == scratch


def test_scratch_of_a_window_does_not_grow_with_the_context_behind_it():
    """But for the block ids, which are copied."""
    store = make(KVSpec(1, 1, 16, "float32", 8), 2)
    q, queries = np.ones((1, 1, 16), np.float32), np.array([0, 1])
    needed = []
    for context in (2048, 65_536):  # all tokens in one block: what is read does not matter
        store.attend(0, q, np.empty_like(q), np.ones((1, context // 8), np.int32), np.array([context]), queries,
                     options=AttentionOptions(window=1000))  # fmt: skip
        needed.append(store.scratch_nbytes)
    assert 0 < needed[1] - needed[0] <= 4 * (65_536 // 8) + 4096


def test_one_call_after_the_other_has_the_workers():
    array = np.ones(2**22, np.float32)

    def seconds_of_workers():
        return time.process_time() - time.thread_time()

    assert read_sum([array], 2) == array.size
    before, most = seconds_of_workers(), time.thread_time() + 10
    while seconds_of_workers() - before < 0.05:
        assert time.thread_time() < most, "the caller works alone"
        read_sum([array], 2)


def test_two_stores_in_two_threads_give_right_results_and_both_finish():
    cases = [Case(), Case(KVSpec(2, 2, 16, "bfloat16", 8, layout="HND"))]
    expected = [case.attend() for case in cases]

    def work(case, right):
        for _ in range(300):
            case.store.copy_blocks(np.array([[0, case.unused, 8]]))
            assert np.array_equal(case.attend(), right)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, cases, expected))


def test_a_second_call_on_a_store_that_is_busy_is_refused():
    """The number of the layer may be computed in Python, so a call can be caught in the middle of another one."""
    store = Case().store

    class Meddler:
        def __index__(self):
            with pytest.raises(ConcurrentUse, match=r"^\[zero\] the store is inside another call \(gather\)"):
                store.zero(np.array([1]))
            return 0

    store.gather(Meddler(), np.array([1]), *np.zeros((2, 8, 2, 16), np.float32))


def test_concurrent_calls_on_one_store_are_refused_or_right():
    spec = KVSpec(1, 8, 64, "float32", 16)
    store = make(spec, 400)
    q, tables = np.ones((8, 32, 64), np.float32), np.tile(np.arange(400, dtype=np.int32), (8, 1))
    lens, sums = np.full(8, 6400), np.arange(9)
    refused, answered = [], []

    def work(_):
        out = np.full((8, 32, 64), np.nan, np.float32)
        for _ in range(40):
            try:
                store.attend(0, q, out, tables, lens, sums)
            except ConcurrentUse:
                refused.append(1)
            else:
                answered.append(bool((out == 0).all()))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert len(refused) + len(answered) == 120 and all(answered) and answered
    assert refused, "three threads never met: the GIL was not released"


def run(code, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
    inherited["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True)


SHOW = "from kvpool_backends import cpu; print(cpu.default_isa(), cpu.num_threads(), cpu.isas()[-1])"


def test_defaults_are_the_best_instruction_set_and_the_cpus_of_the_process():
    isa, threads, best = run(SHOW).stdout.split()
    assert isa == best == isas()[-1] and int(threads) >= 1
    if hasattr(os, "sched_setaffinity"):
        code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + SHOW
        assert run(code).stdout.split()[1] == "1"


@pytest.mark.parametrize("isa", isas())
def test_environment_chooses_the_instruction_set_and_the_threads(isa):
    assert run(SHOW, KVPOOL_CPU_ISA=isa, KVPOOL_NUM_THREADS="3").stdout.split()[:2] == [isa, "3"]


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("KVPOOL_CPU_ISA", "mmx", "portable"),
        ("KVPOOL_CPU_ISA", "AVX2", "portable"),
        *[("KVPOOL_NUM_THREADS", value, "1 .. 1024") for value in ("0", "-1", "two", "1025", "1.5", "9" * 5000)],
    ],
)
def test_environment_that_cannot_be_is_an_import_error_with_the_choices(variable, value, told):
    result = run("import kvpool_backends.cpu", **{variable: value})
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError: [kvpool_backends.cpu] " + variable) and told in last


def test_a_forked_child_computes_with_threads_of_its_own():
    code = """
        import os, sys, time
        sys.path[:0] = ["tests/cpu", "tests/helpers"]
        from test_cpu_store import Case
        import numpy as np
        case = Case(num_threads=3)
        large = np.ones((2**20,), np.float32)
        from kvpool_backends.cpu import read_sum
        before, total = case.attend(), read_sum([large], 3)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                same = np.array_equal(case.attend(), before) and read_sum([large], 3) == total
                most = time.thread_time() + 10
                while same and time.process_time() - time.thread_time() < 0.02:  # what others than the caller did
                    read_sum([large], 3)
                    same = time.thread_time() < most
                case.store.zero(np.arange(20))      # in the child's copy of the memory only
                os._exit(0 if same and not case.attend().any() else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert np.array_equal(case.attend(), before)
        print("done")
    """
    result = run(code)
    assert result.stdout.strip() == "done", result.stderr


@pytest.mark.parametrize("threads", [1, 2, None])
def test_read_sum_adds_every_element_once(threads):
    ones = [np.ones(n, np.float32) for n in (0, 1, 63, 4096, 100_003)]
    assert read_sum(ones, threads) == sum(array.size for array in ones)
    assert read_sum([np.zeros(7, np.uint16), bytearray(5)], threads) == 0.0
    assert read_sum([], threads) == 0.0
