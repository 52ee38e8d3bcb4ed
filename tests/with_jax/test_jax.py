"""JAX on a kvpool pool: tokens equal a model without cache, in every padding, with clones, frees and static shapes."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_page import examples
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax_llama import SCALE, VOCAB, empty_kv, forward, make_params, padded, solo, step

from kvpool.adapters.jax import PADDINGS, PageTable, attend
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError, StaleHandle

PAGE, MAX_SEQS, WIDTH, PREFILL, NEW = 4, 4, 16, 24, 9
PROMPT_LENGTHS = (5, 1, 12, 8, 3, 17, 9)


@pytest.fixture(scope="module")
def params():
    return make_params(0)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, n).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(params, prompts):
    tokens = [solo(params, prompt, NEW) for prompt in prompts]
    assert len({token for row in tokens for token in row}) > 20  # a wrong cache would show
    return tokens


def ref_attention(q, pages, info, scale):
    """JAX's own reference on the same arrays; it gives rows for real tokens only, and NaN times 0 is NaN in it."""
    clean = jnp.nan_to_num(pages)
    out = ref_ragged_paged_attention(
        q, clean, info.seq_lens, info.page_indices, info.cu_q_lens, info.num_seqs, sm_scale=scale
    )
    return jnp.zeros_like(q).at[: len(out)].set(out)


def serve(table, kv, params, prompts, run):
    """Continuous batching by hand: prefill what fits, decode together, free in the loop. Returns tokens and KV."""
    waiting, running, done = list(range(len(prompts))), {}, {}
    while waiting or running:
        while waiting and len(running) < MAX_SEQS:
            prompt = prompts[waiting[0]]
            try:
                seq = table.open(len(prompt) + NEW)
            except OutOfBlocks:
                break
            info = table.allocate([seq], [len(prompt)])
            logits, kv = run(params, kv, padded(prompt, PREFILL), info)
            table.done()
            running[seq] = (waiting.pop(0), [int(jnp.argmax(logits[len(prompt) - 1]))])
        seqs = list(running)
        info = table.allocate(seqs, max_tokens=MAX_SEQS)
        last = [running[seq][1][-1] for seq in seqs]
        logits, kv = run(params, kv, padded(last, MAX_SEQS), info)
        table.done()
        for row, seq in enumerate(seqs):
            running[seq][1].append(int(jnp.argmax(logits[row])))
        finished = [len(running[seq][1]) == NEW for seq in seqs]
        table.free_finished(seqs, finished)
        for seq, is_over in zip(seqs, finished, strict=True):
            if is_over:
                index, tokens = running.pop(seq)
                done[index] = tokens
    return [done[index] for index in range(len(prompts))], kv


@pytest.mark.parametrize("pad", PADDINGS)
def test_llama_on_pages_equals_the_model_without_cache(params, prompts, expected, pad):
    table = PageTable(20, PAGE, MAX_SEQS, WIDTH, PREFILL, pad=pad)  # room for three requests: frees happen in the loop
    tokens, _ = serve(table, empty_kv(20, PAGE), params, prompts, step)
    assert tokens == expected
    assert table.pool.stats().used == 0


def test_clones_share_pages_and_equal_samples_of_their_own(params, prompts):
    prompt, n = prompts[5], 3

    def pick(index, logits, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), index), position)
        return int(jax.random.categorical(key, logits))

    wanted = [solo(params, prompt, NEW, partial(pick, index)) for index in range(n)]
    assert len(set(map(tuple, wanted))) == n
    table, kv = PageTable(40, PAGE, MAX_SEQS, WIDTH, PREFILL), empty_kv(40, PAGE)
    parent = table.open(len(prompt))
    info = table.allocate([parent], [len(prompt)])
    logits, kv = step(params, kv, padded(prompt, PREFILL), info)
    table.done()
    seqs = [parent, *table.clone(parent, n - 1).tolist()]
    assert table.pool.stats().used == -(-len(prompt) // PAGE)
    tokens = [[pick(index, logits[len(prompt) - 1], 0)] for index in range(n)]
    for position in range(1, NEW):
        info = table.allocate(seqs, max_tokens=MAX_SEQS)
        logits, kv = step(params, kv, padded([row[-1] for row in tokens], MAX_SEQS), info)
        table.done()
        for index in range(n):
            tokens[index].append(pick(index, logits[index], position))
    assert tokens == wanted
    assert table.pool.stats().cow_copies == n - 1  # the last page, once for each but one


def test_reset_is_logical_and_stale_pages_do_not_matter(params, prompts, expected):
    table = PageTable(20, PAGE, MAX_SEQS, WIDTH, PREFILL)
    tokens, kv = serve(table, empty_kv(20, PAGE), params, prompts[2:5], step)
    assert tokens == expected[2:5]
    before = [np.array(pages) for pages in kv]
    table.reset()
    assert all(np.array_equal(old, pages, equal_nan=True) for old, pages in zip(before, kv, strict=True))
    poisoned = [jnp.full_like(pages, jnp.nan) for pages in kv]
    assert serve(table, poisoned, params, prompts[:2], step)[0] == expected[:2]


def test_steady_state_compiles_nothing(params, prompts):
    table = PageTable(64, PAGE, MAX_SEQS, WIDTH, PREFILL)
    run = jax.jit(forward)
    serve(table, empty_kv(64, PAGE), params, prompts, run)
    assert run._cache_size() == 2  # one shape for prefill, one for decode
    serve(table, empty_kv(64, PAGE), params, prompts[::-1], run)
    assert run._cache_size() == 2


def test_info_keeps_its_values_when_the_next_step_is_planned():
    table = PageTable(20, PAGE, MAX_SEQS, WIDTH, PREFILL)
    seq = table.open()
    info = table.allocate([seq], [5])
    before = [np.array(leaf) for leaf in jax.tree.leaves(info)]
    table.done()
    table.allocate([seq], [7])
    for old, leaf in zip(before, jax.tree.leaves(info), strict=True):
        assert np.array_equal(old, leaf) and leaf.dtype == jnp.int32


def test_attend_equals_jaxs_reference_on_ragged_batches():
    rng = np.random.default_rng(3)
    for _ in range(10):
        table = PageTable(40, PAGE, MAX_SEQS, WIDTH, PREFILL, pad=int(rng.choice(PADDINGS)))
        pages = jnp.asarray(rng.standard_normal((40, PAGE, 4, 16)), jnp.float32)
        seqs = [table.open() for _ in range(int(rng.integers(1, MAX_SEQS + 1)))]
        for _ in range(3):
            info = table.allocate(seqs, rng.integers(0, 6, len(seqs)))
            table.done()
        q = jnp.asarray(rng.standard_normal((PREFILL, 8, 16)), jnp.float32)
        ours, theirs = attend(q, pages, info, SCALE), ref_attention(q, pages, info, SCALE)
        real = int(info.cu_q_lens[-1])
        assert np.abs(np.array(ours - theirs))[:real].max(initial=0) < 2e-6
        assert not np.array(ours)[real:].any()


def test_bad_calls_are_refused_and_change_nothing():
    for pad in (1, 19, 20, 30, 20 * PAGE - 1):  # pages, then slots
        with pytest.raises(ValueError, match=f"pad is {pad}, a page or a slot: they are below 80"):
            PageTable(20, PAGE, MAX_SEQS, WIDTH, PREFILL, pad=pad)
    for pad in (*PADDINGS, 20 * PAGE):
        assert PageTable(20, PAGE, MAX_SEQS, WIDTH, PREFILL, pad=pad).plan.limits.max_rows == MAX_SEQS
    table = PageTable(6, PAGE, MAX_SEQS, WIDTH, PREFILL)
    seq = table.open(8)
    before = table.pool.fingerprint()
    for error, call in (
        (OutOfBlocks, lambda: table.allocate([seq], [24])),
        (CapacityExceeded, lambda: table.allocate([seq], [PREFILL + 1])),
        (StaleHandle, lambda: table.allocate([seq + (1 << 20)])),
        (OutOfBlocks, lambda: table.open(60)),
        (PlanStateError, table.done),
        (ValueError, lambda: table.free_finished([seq], [True, False])),
        (ValueError, lambda: table.allocate([seq], [3], max_tokens=2)),
    ):
        with pytest.raises(error):
            call()
        assert table.pool.fingerprint() == before
    table.allocate([seq], [2])
    table.undo()
    assert table.pool.num_tokens(seq) == 0


def test_example_of_the_page_runs(capsys):
    (code,) = examples("jax")
    exec(code, {})
    assert capsys.readouterr().out == "(32, 4, 8) 2\n"


def test_decode_step_takes_no_more_memory_with_more_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "adapters"))
    from test_adapter_allocation import GROWTH_MAX, STEPS, measured

    peaks = []
    for num_pages, width in ((256, 64), (4096, 512)):
        table = PageTable(num_pages, 16, MAX_SEQS, width, MAX_SEQS)
        seqs = [table.open(num_pages // 8 * 16) for _ in range(MAX_SEQS)]

        def step(table=table, seqs=seqs):
            table.allocate(seqs)
            table.undo()

        peak, stays = measured(step)
        assert stays <= 128 * STEPS  # JAX's own caches; one array that is kept in each step would be more
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= GROWTH_MAX
