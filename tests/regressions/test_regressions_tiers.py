"""Family J: tiers and persistence. See README.md."""

import errno
import os

import numpy as np
import pytest

from kvpool.store import BlockLayout, Blocks, DiskStore, Layout
from kvpool.testing import stores as kit

LAYOUT = Layout((BlockLayout(2, 50, "full"),), "w")
QUOTA, SEGMENT = 1 << 14, 1 << 12  # bytes: about 14 blocks in a segment
TOKENS = kit.prompt(1, 12)


@pytest.fixture
def make_store(tmp_path):
    """Open the directory of the test, as it is when everything there is known."""
    made = []

    def make():
        made.append(DiskStore(str(tmp_path / "store"), LAYOUT, QUOTA, segment_nbytes=SEGMENT))
        assert made[-1].ready.wait(60)
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, None], ids=["EIO", "ENOSPC", "short"])
def test_j1_block_whose_write_failed_stays_a_miss(make_store, monkeypatch, error):
    write = os.pwritev

    def fails(fd, buffers, offset):
        if error is None:
            return write(fd, [bytes(buffers[0])[:20]], offset)
        raise OSError(error, os.strerror(error))

    blocks, rows = LAYOUT.blocks(TOKENS)[0], kit.content(LAYOUT, LAYOUT.blocks(TOKENS)[0])
    store = make_store()
    monkeypatch.setattr(os, "pwritev", fails)
    store.store(blocks, rows)
    assert store.drain(60)
    assert not store.lookup(blocks).any()
    kit.loads(store, blocks, [])
    monkeypatch.undo()
    kit.loads(store, blocks, [])
    again = make_store()
    kit.loads(again, blocks, [])
    kit.stores(again, blocks)
    kit.loads(again, blocks, range(6))


def test_j2_key_of_another_prompt_brings_nothing_from_the_disk(make_store):
    """Keys that collide: other tokens, another prefix, another tenant."""
    own, other = LAYOUT.blocks(TOKENS)[0], LAYOUT.blocks(kit.prompt(2, 12), b"tenant")[0]
    store = make_store()
    kit.stores(store, own)
    for changed in ("tokens", "parents", "namespace"):
        names = {name: getattr(own, name) for name in ("keys", "parents", "tokens", "namespace")}
        asked = Blocks(**names | {changed: getattr(other, changed)})
        assert not kit.loads(store, asked).any(), changed
    kit.loads(store, own, range(6))


def test_j2_each_prompt_reads_its_own_bytes_while_segments_leave(make_store):
    """Tenants with the same prompts and prompts with the same beginnings, in a quota that holds a few of them."""
    rng = np.random.default_rng(3)
    print("seed 3")
    prompts = [np.append(TOKENS[:4], kit.prompt(seed, 8)) for seed in range(12)]
    requests = [LAYOUT.blocks(tokens, tenant)[0] for tokens in prompts for tenant in (b"", b"a")]
    store = make_store()
    for number in rng.permutation(len(requests)):
        kit.stores(store, requests[number])
        assert kit.loads(store, requests[number]).any(), "a segment leaves for the newest blocks, not with them"
        held = sum(int(kit.loads(store, request).sum()) for request in requests)
    assert 0 < held < 6 * len(requests)
    again = make_store()
    assert any(kit.loads(again, request).any() for request in requests)
