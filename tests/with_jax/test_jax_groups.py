"""Layer groups in JAX: each group's pages give what dense attention gives, windows let pages go, choices are named."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvpool import Group
from kvpool.adapters.jax import PADDINGS, PageTable, attend, copy_pages, update

PAGE, MAX_SEQS, WIDTH, TOKENS, KV_HEADS, DIM, WINDOW = 4, 4, 12, 24, 2, 8, 6
GROUPS = [Group.window(WINDOW), Group.full(arena=1, num_blocks=90), Group.window(WINDOW, arena=1, block_size=8)]
BOUNDS = [WINDOW, None, WINDOW]


def make_table(**options):
    return PageTable(90, PAGE, MAX_SEQS, WIDTH, TOKENS, groups=GROUPS, **options)


def empty(table):
    """One KV array per group, full of NaN: whatever is read before it is written shows."""
    sizes = [group.block_size or PAGE for group in table.pool.options.groups]
    return [jnp.full((90, size, 2 * KV_HEADS, DIM), jnp.nan) for size in sizes]


def dense(q, k, v, window):
    """Attention of the last query of a sequence, in float64; one head per KV head."""
    k, v = k[-(window or len(k)) :].astype(np.float64), v[-(window or len(v)) :].astype(np.float64)
    score = np.einsum("hd,khd->hk", q, k) * DIM**-0.5
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hk,khd->hd", weight / weight.sum(-1, keepdims=True), v)


def served(seed, steps=12):
    """A random engine with clones; the largest difference from dense attention, over all groups and tokens."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    table = make_table(pad=PADDINGS[seed % len(PADDINGS)])
    kv, known, worst = empty(table), {}, 0.0
    for _ in range(steps):
        while len(known) < MAX_SEQS and rng.random() < 0.6:
            if known and rng.random() < 0.4:
                parent = int(rng.choice(list(known)))
                known[int(table.clone(parent)[0])] = known[parent]
            else:
                known[table.open()] = np.zeros((0, 3, KV_HEADS, DIM), np.float32)
        seqs = [seq for seq in known if len(known[seq]) < PAGE * WIDTH - 8]
        if not seqs:
            break
        counts = rng.integers(1, 7, len(seqs)).tolist()
        new = rng.standard_normal((sum(counts), 3, KV_HEADS, DIM)).astype(np.float32)  # queries, keys, values
        padded = np.concatenate([new, np.zeros((TOKENS - len(new), 3, KV_HEADS, DIM), np.float32)])
        infos = [table.allocate(seqs, counts, group=0), *(table.info(group) for group in (1, 2))]
        outs = []
        for group, info in enumerate(infos):
            kv[group] = update(copy_pages(kv[group], info), info, padded[:, 1], padded[:, 2])
            outs.append(np.asarray(attend(jnp.array(padded[:, 0]), kv[group], info, DIM**-0.5, BOUNDS[group])))
        table.done()
        at = 0
        for seq, count in zip(seqs, counts, strict=True):
            for _ in range(count):
                known[seq] = np.concatenate([known[seq], new[at : at + 1]])
                query, keys, values = known[seq][-1, 0], known[seq][:, 1], known[seq][:, 2]
                for group, window in enumerate(BOUNDS):
                    wanted = dense(query, keys, values, window)
                    worst = max(worst, np.nan_to_num(np.abs(outs[group][at] - wanted), nan=np.inf).max())
                at += 1
        if rng.random() < 0.3:
            gone = int(rng.choice(list(known)))
            assert table.free_finished([gone], [True]) == 1
            del known[gone]
    table.pool.check()
    return worst


@pytest.mark.parametrize("seed", range(6))
def test_every_group_equals_dense_attention(seed):
    assert served(seed) < 1e-5


def test_window_lets_pages_go_and_full_group_does_not():
    table = make_table()
    seq = table.open()
    for _ in range(40):
        table.allocate([seq], max_tokens=MAX_SEQS, group=0)
        table.done()
    read = (40 - WINDOW + 1) // PAGE  # of the page with the oldest token that the next query reads
    assert table.pool.stats(0).used == 40 // PAGE - read
    assert table.pool.table(seq, 1)[:, 0].all(), "page 0 stands for one that was let go"


@pytest.mark.parametrize("call", [lambda table, **group: table.allocate([table.open()], **group), PageTable.info])
def test_table_of_several_groups_asks_which_one_is_meant(call):
    table = make_table()
    with pytest.raises(ValueError, match=r"3 layer groups, .*group=0 \(window 6\), group=1 \(full\), group=2 "):
        call(table)
    with pytest.raises(ValueError, match=r"no such layer group \(3\), there are group=0 "):
        call(table, group=3)


def test_refused_allocation_changes_nothing():
    table = make_table()
    seq, before = table.open(), table.pool.fingerprint()
    with pytest.raises(ValueError, match="say of which"):
        table.allocate([seq], [5])
    assert table.pool.fingerprint() == before


@pytest.mark.parametrize(
    ("groups", "options", "text"),
    [
        ([Group.full(columns=2)], {}, r"groups\[0\] is full with 2 columns"),
        ([Group.full(), Group.state(8)], {}, r"groups\[1\] is state"),
        (GROUPS, {"pad": 8 * 90 - 1}, f"pad is {8 * 90 - 1}, a page or a slot: they are below {8 * 90}"),
    ],
)
def test_groups_that_have_no_pages_are_refused(groups, options, text):
    with pytest.raises(ValueError, match=text):
        PageTable(40, PAGE, MAX_SEQS, WIDTH, TOKENS, groups=groups, **options)


def test_table_of_one_group_needs_no_choice():
    table = PageTable(40, PAGE, MAX_SEQS, WIDTH, TOKENS, groups=[Group.window(WINDOW)])
    info = table.allocate([table.open()], [5])
    assert info.page_indices.shape == (MAX_SEQS, WIDTH) and info.new_token_dests.shape == (TOKENS,)
