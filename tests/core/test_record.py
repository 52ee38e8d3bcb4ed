"""Calls that a pool recorded: on a new pool they go the same way, wrapped, damaged and minimised."""

import json
import random
import struct
import zlib

import numpy as np
import pytest

import kvpool
from benchmarks import recording
from kvpool import Plan, Pool
from kvpool._core import BlockAPI
from kvpool.cli import main
from kvpool.errors import KVPoolError
from kvpool.replay import calls as files
from kvpool.replay.rerun import minimise, rerun


class Life:
    """A pool that lives a random life, every call of which changes something or is refused."""

    def __init__(self, seed, record=1 << 20, **options):
        self.rng = random.Random(seed)
        cached = seed % 2 == 0
        self.pool = Pool(
            48, 4, max_seqs=12, max_blocks_per_seq=16, seed=seed, record=record, in_order=seed % 3 == 0,
            prefix_cache=cached, **options,
        )  # fmt: skip
        self.plans = [Plan(self.pool, 8, 64, formats=("block_tables",)) for _ in range(2)]
        self.open, self.ids, self.cached = [], [], cached

    def some(self, things, most=4):
        return self.rng.sample(things, min(len(things), self.rng.randint(1, most)))

    def do(self, verb):
        pool, rng = self.pool, self.rng
        if verb == "open":
            tokens = [rng.randrange(3) for _ in range(rng.randrange(20))] if rng.random() < 0.6 else rng.randrange(9)
            self.open.append(pool.open(tokens, rng.choice([b"", b"tenant"])))
        elif verb == "step":
            rows = self.some(self.open, 8)
            new = rng.choice([1, [rng.randrange(6) for _ in rows]])
            pool.step(rng.choice(self.plans), np.array(rows, np.int64), new, partial=rng.random() < 0.3)
        elif verb == "again":
            plan = rng.choice(self.plans)
            pool.step(plan, plan.handles.copy(), 1)
        elif verb == "reserve":
            pool.reserve(rng.choice(self.plans), self.some(self.open), rng.randrange(9))
        elif verb in ("done", "rollback"):
            getattr(pool, verb)(rng.choice(self.plans))
        elif verb == "fork":
            self.open += pool.fork(rng.choice(self.open), rng.randrange(4)).tolist()
        elif verb == "truncate":
            rows = self.some(self.open)
            pool.truncate(rows, [rng.randint(0, pool.num_tokens(h)) for h in rows])
        elif verb == "close":
            pool.close(rows := self.some(self.open))
            self.open = [h for h in self.open if h not in rows]
        elif verb == "close_finished":
            rows = self.some(self.open)
            pool.close_finished(rows, [rng.random() < 0.5 for _ in rows])
            self.open = [h for h in self.open if pool.is_open(h)]
        elif verb == "defer":
            pool.defer_close(h := rng.choice(self.open))
            self.open.remove(h)
        elif verb == "alloc":
            self.ids += pool.blocks.alloc(rng.randrange(4)).tolist()
        elif verb in ("free", "decref", "incref", "mark_cached"):
            ids = self.some(self.ids)
            getattr(pool.blocks, verb)(ids)
            self.ids = [i for i in self.ids if pool.blocks.refcount(i)]
        elif verb == "commit":
            h = rng.choice(self.open)
            pool.prefix.commit(h, [rng.randrange(3) for _ in range(rng.randrange(9))])
        elif verb == "unshare":
            rows = self.some(self.open)
            pool.unshare(rng.choice(self.plans), rows, [rng.randint(0, pool.kv_len(h)) for h in rows], rng.randrange(6))
        elif verb == "compact":
            rows = self.some(self.open)
            pool.compact(rows, [rng.randint(0, pool.kv_len(h)) for h in rows], rng.randrange(6))
        elif verb == "evict_blocks":
            pool.evict_blocks(h := rng.choice(self.open), self.some(range(pool.kv_len(h) // 4)))
        elif verb == "pin":
            self.open.append(pool.prefix.pin([rng.randrange(3) for _ in range(8)]))
        elif verb == "flush":
            pool.prefix.flush(rng.choice([None, b"tenant"]))
        elif verb in ("evict", "drain_evicted"):
            getattr(pool.blocks, verb)(*([3] if verb == "evict" else []))
        elif verb == "blocks.take":
            self.ids += pool.blocks.take(rng.randrange(4))[0]
        elif verb == "blocks.take_block":
            pool.blocks.take_block(i := rng.randrange(1, 48))
            self.ids.append(i)
        elif verb.startswith("blocks."):
            ids = self.some(self.ids)
            options = {"oldest": rng.random() < 0.5} if verb == "blocks.release" else {}
            getattr(pool.blocks, verb.removeprefix("blocks."))(ids, **options)
        elif verb == "reset":
            pool.reset()
            self.open, self.ids = [], []

    def run(self, count, reset=0.0):
        verbs = [
            *("open", "step", "step", "again", "reserve", "done", "done", "rollback", "fork", "truncate", "close"),
            *("close_finished", "defer", "alloc", "free", "decref", "incref", "mark_cached", "evict"),
            *("drain_evicted", "unshare", "compact", "compact", "evict_blocks"),
        ]
        if self.cached:
            verbs += ["commit", "commit", "pin", "flush"]
        else:
            calls = ("take", "take_block", "mark_cached", "release", "release", "touch", "uncache")
            verbs += [f"blocks.{call}" for call in calls]
        for _ in range(count):
            try:
                self.do("reset" if self.rng.random() < reset else self.rng.choice(verbs))
            except (KVPoolError, ValueError, IndexError):  # refused, or nothing there to choose from
                continue
        return self.pool


@pytest.mark.parametrize("seed", range(12))
def test_replay_goes_the_same_way(seed, tmp_path):
    pool = Life(seed).run(600, reset=0.002)
    kept = files.save(pool, tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    assert len(record.calls) == kept > 150 and record.header["lost"] == 0
    assert rerun(record, check_every=50) is None


@pytest.mark.parametrize("seed", range(12))
def test_ring_that_wrapped_begins_at_the_last_reset(seed, tmp_path):
    pool = Life(seed, record=6000).run(2500, reset=0.02)
    files.save(pool, tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    assert record.header["lost"] > 0 and record.begins is not None
    assert rerun(record, check_every=20) is None


def test_ring_that_lost_its_beginning_says_so(tmp_path):
    pool = Life(1, record=2000).run(600)
    files.save(pool, tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    assert record.begins is None
    with pytest.raises(files.RecordError, match=r"calls are lost and no reset"):
        rerun(record)


def test_call_larger_than_the_ring_is_lost_and_the_next_reset_begins_anew(tmp_path):
    pool = Pool(4000, 1, record=4096)
    pool.blocks.free(pool.blocks.alloc(3000))
    pool.reset()
    pool.blocks.free(pool.blocks.alloc(3))
    files.save(pool, tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    assert [call.name for call in record.calls] == ["start", "blocks.alloc", "blocks.free"]
    assert record.header["lost"] == 2
    assert rerun(record) is None


def test_random_seed_may_be_given_again():
    for _ in range(64):
        assert Pool(2, 1, seed=(seed := Pool(2, 1).options.seed)).options.seed == seed


def test_recording_changes_nothing_else():
    with_record, without = Life(4).run(300), Life(4, record=0).run(300)
    assert with_record.digest() == without.digest() and with_record.fingerprint() == without.fingerprint()


def test_same_rows_are_written_once(tmp_path):
    pool = Pool(600, 16, record=1 << 16, in_order=True, max_seqs=64)
    plan, handles = Plan(pool, 64), np.array([pool.open() for _ in range(64)])
    for _ in range(10):
        pool.step(plan, handles, 1)
    body, _, _ = pool._recorded()
    assert len(body) <= 64 * 24 + 64 * 4 + 11 * 16


@pytest.mark.parametrize("record", [1, 7, -1, (1 << 33) + 1, 1 << 40, 1 << 64])
def test_ring_of_a_size_out_of_range_is_refused(record):
    """Above it the number of a batch would not fit into its head; below it nothing is kept, and nobody would know."""
    with pytest.raises(ValueError, match=rf"^\[Pool\] record is .*\({record}\D.* {1 << 33}$"):
        Pool(8, 4, record=record)


def test_smallest_ring_says_what_it_lost(tmp_path):
    pool = Pool(8, 4, record=8)
    pool.blocks.free(pool.blocks.alloc(1))
    assert files.save(pool, tmp_path / "calls") == 0
    assert files.load(tmp_path / "calls").header["lost"] == 2


def test_pool_that_records_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\[save\].*record="):
        files.save(Pool(8, 4), tmp_path / "calls")


def test_damaged_files_are_refused_in_words(tmp_path):
    path = tmp_path / "calls"
    files.save(Life(2).run(200), path)
    whole = path.read_bytes()
    rng = random.Random(1)
    for cut in [0, 3, 8, 15, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(60))]:
        path.write_bytes(whole[:cut])
        with pytest.raises(files.RecordError, match="calls"):
            files.load(path)
    for _ in range(300):
        bit, changed = rng.randrange(8 * len(whole)), bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(files.RecordError):
            files.load(path)


def test_files_with_a_right_checksum_and_wrong_content_are_refused_or_fail(tmp_path):
    """What a bit does that the checksum has not seen: an error in words, or a call that goes another way."""
    path = tmp_path / "calls"
    files.save(Life(5).run(120), path)
    pool, whole, rng = files.load(path).header["pool"], path.read_bytes()[:-4], random.Random(2)
    for _ in range(400):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(changed + struct.pack("<I", zlib.crc32(changed)))
        try:
            record = files.load(path)
            if record.header["pool"] == pool:
                rerun(record)
        except files.RecordError:
            continue


class Corrupting(kvpool.Pool):
    """A pool that loses a reference when a sequence is shortened to nothing."""

    def truncate(self, handles, lens):
        """Like the core's, wrong for a length of 0."""
        super().truncate(handles, lens)
        if 0 in np.atleast_1d(lens):
            self._corrupt("num_used", 1)


def test_failing_record_shrinks_to_the_calls_that_matter(tmp_path):
    files.save(Life(1).run(600), tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    failure = rerun(record, Corrupting, check_every=1)
    assert failure.kind == "corrupt" and failure.call.startswith("truncate")
    few = minimise(record, failure, Corrupting)
    assert [call.name for call in few][-1] == "truncate" and len(few) <= 3


def test_record_of_another_outcome_names_the_call(tmp_path):
    class OtherBlocks(BlockAPI):
        def evict(self, n):
            return super().evict(0)

    class Other(kvpool.Pool):
        @property
        def blocks(self):
            return OtherBlocks(self)

    files.save(Life(1).run(600), tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    failure = rerun(record, Other)
    assert failure.kind == "digest" and failure.call.startswith("blocks.evict")
    with pytest.raises(files.RecordError, match="cannot be made smaller"):
        minimise(record, failure, Other)


def test_recording_costs_at_most_a_twentieth_of_every_call():
    counts = recording.instructions()
    if counts is None:
        pytest.skip("valgrind counts the instructions, and is not here")
    assert recording.too_dear(counts) == []


def test_calls_that_recording_makes_too_dear_or_does_not_reach_are_named():
    """The judge of the test above, on figures that are made up."""
    counts = {"least": (1000, 1001), "most": (1000, 1050), "dear": (1000, 1051), "never recorded": (1000, 1000)}
    assert recording.too_dear(counts) == ["dear", "never recorded"]


def test_numbers_of_more_than_a_word_are_kept(tmp_path):
    pool = Pool(80, 1 << 26, max_seqs=2, in_order=True, record=1 << 14)
    plan, (a, b) = Plan(pool, 2, 1 << 26, formats=()), (pool.open(5 << 29), pool.open())
    for _ in range(36):
        pool.step(plan, [a], 1 << 26)
    pool.step(plan, [a, b], [7, 1])
    lengths = [[(1 << 31) + 9, 1], (1 << 31) + 1, 1 << 31, (1 << 31) - 1, (1 << 29) + 1, 1 << 29, (1 << 29) - 1, 0]
    for length in lengths:
        pool.truncate([a, b] if length == lengths[0] else a, length)
    files.save(pool, tmp_path / "calls")
    record = files.load(tmp_path / "calls")
    assert [call.arguments["lens"] for call in record.calls if call.name == "truncate"] == lengths
    assert record.calls[0].arguments["tokens"] == 5 << 29 and rerun(record) is None


def test_record_of_another_format_is_refused_by_its_number(tmp_path):
    path = tmp_path / "calls"
    files.save(Life(2).run(20), path)
    path.write_bytes(b"KVCALLS1" + path.read_bytes()[8:])
    with pytest.raises(files.RecordError, match=r"calls: format b'1', this kvpool reads b'3'"):
        files.load(path)


def test_command_checks_a_record_and_refuses_a_damaged_one(tmp_path, capsys):
    path = tmp_path / "calls"
    files.save(Life(3).run(200), path)
    assert main(["replay", "--ops", str(path)]) == 0
    assert "every digest as recorded" in capsys.readouterr().out
    assert main(["replay", "--ops", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failure"] is None
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["replay", "--ops", str(path)]) == 2
    assert "cut short or changed" in capsys.readouterr().err
    assert main(["replay", "--ops", str(tmp_path / "none")]) == 2
    assert main(["replay", "--synthetic", "--ops", str(path)]) == 2


def test_command_prints_the_fewest_calls_that_fail(tmp_path, capsys, monkeypatch):
    path = tmp_path / "calls"
    files.save(Life(1).run(600), path)
    monkeypatch.setattr(rerun, "__defaults__", (Corrupting,))
    monkeypatch.setattr(minimise, "__defaults__", (Corrupting, lambda left: None))
    assert main(["replay", "--ops", str(path), "--minimise"]) == 1
    out = capsys.readouterr().out
    assert "FAILED at call" in out and "calls are enough" in out and "truncate(" in out
