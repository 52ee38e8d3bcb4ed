"""Names and layouts, stores in memory and one behind the other."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

import kvpool
from kvpool.store import BlockLayout, DiskStore, Layout, MemoryStore, TieredStore, leading, prefix_keys
from kvpool.store.tiers import lacking
from kvpool.testing import stores as kit

FULL = BlockLayout(4, 100, "full")


@pytest.mark.parametrize("namespace", [b"", b"tenant"])
def test_keys_are_those_of_the_events_of_a_pool(namespace):
    tokens = np.arange(1, 19, dtype=np.int32)
    with kvpool.Pool(64, 4, prefix_cache=True, events=64) as pool:
        plan = kvpool.Plan(pool, 1, 64)
        handle = pool.open(tokens, namespace)
        pool.step(plan, [handle], len(tokens))
        pool.done(plan)
        pool.prefix.commit(handle, tokens)
        events = pool.prefix.events()
    blocks = Layout((FULL,), b"w").blocks(tokens, namespace)[0]
    assert [event[1] for event in events] == [key.tobytes() for key in blocks.keys]
    assert [event[2] for event in events][1:] == [parent.tobytes() for parent in blocks.parents][1:]
    assert blocks.parents[0].tobytes() == blocks.namespace == hashlib.sha256(namespace).digest()[:16]


def test_groups_with_larger_blocks_have_the_keys_of_their_ends():
    small, large = Layout((FULL, BlockLayout(12, 8, "window")), b"w").blocks(range(41))
    assert (len(small), len(large)) == (10, 3)
    for number in range(3):
        assert large.keys[number].tobytes() == small.keys[3 * number + 2].tobytes()
        assert large.parents[number].tobytes() == small.parents[3 * number].tobytes()
        assert large.tokens[number].tolist() == list(range(12 * number, 12 * number + 12))


def test_layouts_that_differ_anywhere_have_other_digests():
    layouts = [
        Layout((FULL,), b"w"),
        Layout((FULL,), b"v"),
        Layout((FULL, FULL), b"w"),
        Layout((FULL,), b"w", block_size=2),
        Layout((BlockLayout(8, 100, "full"),), b"w"),
        Layout((BlockLayout(4, 101, "full"),), b"w"),
        Layout((BlockLayout(4, 100, "full "),), b"w"),
        Layout((BlockLayout(4, 100, "full\n4 tokens, 100 bytes: full"),), b"w"),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert Layout([FULL], "w").digest == layouts[0].digest


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Layout((), b"w"), ValueError),
        (lambda: Layout((FULL,) * 1025, b"w"), ValueError),
        (lambda: Layout(("full",), b"w"), TypeError),
        (lambda: Layout((FULL,), 7), TypeError),
        (lambda: Layout((FULL,), b"w", block_size=3), ValueError),
        (lambda: Layout((FULL,), b"w").blocks([[1]]), ValueError),
        (lambda: Layout((FULL,), b"w").blocks([1.5]), TypeError),
        (lambda: Layout((FULL,), b"w").blocks([-1]), ValueError),
        (lambda: Layout((FULL,), b"w").blocks([2**31]), ValueError),
        (lambda: Layout((FULL,), b"w").blocks([1], "tenant"), TypeError),
        (lambda: BlockLayout(0, 1, ""), ValueError),
        (lambda: BlockLayout(True, 1, ""), TypeError),
        (lambda: BlockLayout(1, 1, b""), TypeError),
        (lambda: prefix_keys([[1]], 4), ValueError),
        (lambda: MemoryStore(Layout((FULL,), b"w"), 99), ValueError),
        (lambda: MemoryStore(Layout((FULL,), b"w"), 0), ValueError),
        (lambda: MemoryStore("layout", 99), TypeError),
        (lambda: DiskStore("nowhere", b"layout", 99), TypeError),
        (lambda: TieredStore([]), ValueError),
        (lambda: TieredStore([MemoryStore(Layout((FULL,), weights), 100) for weights in (b"v", b"w")]), ValueError),
    ],
)
def test_word_that_is_none_is_refused(make, error):
    with pytest.raises(error, match=r"^\[\w+\] "):
        make()


def test_leading_counts_up_to_the_first_that_is_missing():
    for found, count in (([], 0), ([False], 0), ([True], 1), ([True, True, False, True], 2)):
        assert leading(np.array(found, bool)) == count


def test_memory_keeps_the_most_recently_used_within_its_budget():
    layout = Layout((FULL,), b"w")
    store, blocks = MemoryStore(layout, 350), layout.blocks(kit.prompt(1))[0]
    kit.stores(store, blocks[:3])
    kit.loads(store, blocks[:1], [0])
    store.touch(blocks[1:2])
    kit.stores(store, blocks[3:4])
    kit.loads(store, blocks[:5], [0, 1, 3])
    kit.stores(store, blocks[4:])
    stats = store.stats()["memory"]
    assert (stats.blocks, stats.nbytes, stats.evicted) == (3, 300, 12)


def test_tiers_answer_for_each_other(tmp_path):
    layout = kit.LAYOUT
    blocks = layout.blocks(kit.prompt(1))[0]
    memory, disk = MemoryStore(layout, 3000), DiskStore(str(tmp_path / "store"), layout, 1 << 24, queue_nbytes=1500)
    tiers = TieredStore([memory, disk])
    rows = kit.content(layout, blocks)
    for number in range(15):
        assert tiers.store(blocks[number : number + 1], rows[number : number + 1]) == 1
        assert tiers.drain()
    assert int(memory.lookup(blocks).sum()) == 3000 // 700
    kit.loads(tiers, blocks, range(15))
    assert {name: stats.hits for name, stats in tiers.stats().items()} == {"memory": 4, "disk": 11}
    (segment,) = (tmp_path / "store").glob("*.kvpool-open")
    segment.write_bytes(b"")  # the disk has lost everything
    kit.loads(tiers, blocks, range(11, 15))


def test_tiers_of_one_kind_are_counted_apart():
    near, far = MemoryStore(kit.LAYOUT, 4000), MemoryStore(kit.LAYOUT, 1 << 20)
    kit.stores(far, kit.LAYOUT.blocks(kit.prompt(1))[0])
    assert {name: stats.blocks for name, stats in TieredStore([near, far]).stats().items()} == {
        "memory": 0,
        "memory 2": 15,
    }


def test_block_that_the_last_tier_refused_is_lacking_until_it_has_it(tmp_path):
    memory, disk = MemoryStore(kit.LAYOUT, 1 << 20), DiskStore(str(tmp_path / "store"), kit.LAYOUT, 1 << 24)
    tiers, blocks = TieredStore([memory, disk]), kit.LAYOUT.blocks(kit.prompt(1))[0]
    assert disk.ready.wait(60)
    disk._paused_until = float("inf")  # as after a write that failed
    kit.stores(tiers, blocks[:10])
    assert disk.is_paused and np.flatnonzero(lacking(tiers, blocks)).tolist() == list(range(10, 15))
    disk._paused_until = 0.0
    assert not disk.is_paused and lacking(tiers, blocks).all() and not lacking(memory, blocks[:10]).any()
    kit.stores(tiers, blocks[lacking(tiers, blocks)])
    memory.close()  # it has forgotten everything
    assert not lacking(tiers, blocks).any()
    kit.loads(tiers, blocks, range(15))


def test_package_imports_no_framework_and_no_core():
    code = "import sys, kvpool.store; print(*{name.split('.')[0] for name in sys.modules})"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx", "mlx_lm", "torch", "jax", "redis", "kvpool_backends"} & set(names)
