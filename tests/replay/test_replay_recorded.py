"""Calls that a `RecordedPool` kept: on a new pool they go the same way; damaged files, and the fewest that fail."""

import dataclasses
import json
import random
import threading

import numpy as np
import pytest
from tests.verify._hooks import corrupt

import kvpool
from benchmarks.command import main
from benchmarks.replay import __main__ as command
from benchmarks.replay.recorded import CALLS, Player, RecordedPool, RecordError, load, minimise, rerun
from kvpool import Group, Plan, Pool
from kvpool._core import BlockAPI
from kvpool.errors import KVPoolError
from tests.verify._verify import Run
from tests.verify.words import shape_of


def life(seed, words=600, pool_type=RecordedPool, **options):
    """A pool after a random program of the fuzzer, on one full group, which is all that is recorded."""
    shape, pools = shape_of(seed), []

    def make_pool(**given):
        pools.append(pool_type(**given, **options))
        return pools[-1]

    pool = shape.pool | {"groups": None, "lookahead": 0, "_hash_bits": 32}
    Run(dataclasses.replace(shape, pool=pool), make_pool).run(words)
    return pools[0]


@pytest.mark.parametrize("seed", range(12))
def test_replay_goes_the_same_way(seed, tmp_path):
    kept = life(seed).save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    assert len(record.calls) == kept > 100 and record.header["lost"] == 0
    assert rerun(record, check_every=50) is None


def test_recording_changes_nothing_else():
    with_record, without = life(4, 300), life(4, 300, Pool)
    assert with_record.digest() == without.digest() and with_record.fingerprint() == without.fingerprint()


def test_every_call_that_changes_something_is_kept():
    """The digest of the last call is the pool's, and lives meet every call of the list."""
    made = set()
    for seed in range(24):
        pool = life(seed, 2000)
        made |= {call.name for call in pool.calls}
        assert next(call.digest for call in reversed(pool.calls) if call.digest is not None) == pool.digest()
    assert {name for name in CALLS if not name.startswith("blocks.")} <= made


def test_record_that_lost_its_beginning_says_so(tmp_path):
    pool = life(1, keep=20)
    assert pool.save(tmp_path / "calls") == 20
    record = load(tmp_path / "calls")
    assert record.header["lost"] > 0
    with pytest.raises(RecordError, match=rf"the first {record.header['lost']} calls are lost"):
        rerun(record)


def test_arguments_of_every_kind_are_kept(tmp_path):
    """Buffers, an array for the result, a plan's own array, padding; refused ones are refused as ever, and not kept."""
    with pytest.raises(ValueError, match="layer groups"):
        RecordedPool(16, 4, groups=[Group.full(columns=2)])
    pool = RecordedPool(40, 4, max_seqs=9, groups=[Group.full()])
    plan, out = Plan(pool, 8, 64), np.zeros(7, np.int32)
    a, b = pool.open(np.arange(5)), pool.open(tokens=3, namespace=b"x")
    pool.step(plan, [a, b], np.array([2, 1], np.int32), pad_to=(8, 64))
    pool.done(plan)
    pool.step(plan, plan.handles, partial=True)
    pool.rollback(plan=plan)
    pool.blocks.alloc(3, out=out)
    pool.blocks.decref(memoryview(out[:2]))
    pool.close_finished([a, b], np.array([True, False]))
    for call in (lambda: pool.close("b"), lambda: pool.fork(b, n=99), lambda: pool.blocks.free([77])):
        with pytest.raises((TypeError, KVPoolError, IndexError)):
            call()
    pool.defer_close(a)
    pool.defer_close(Pool(2, 1).open())
    pool.fork(b, n=2)
    pool.blocks.take(2), pool.blocks.take_block(30)
    pool.blocks.mark_cached([30])
    pool.blocks.release([30], oldest=True)
    pool.blocks.touch([30], blank=True)
    pool.blocks.uncache([30], keep_place=True)
    assert pool.save(tmp_path / "calls") == 18 and rerun(load(tmp_path / "calls"), check_every=1) is None


def test_prompt_that_is_opened_again_is_counted_apart_in_a_replay_too(tmp_path):
    pool = RecordedPool(16, 4, prefix_cache=True)
    pool.open([1, 2, 3], again=True)
    pool.save(tmp_path / "calls")
    player = Player((record := load(tmp_path / "calls")).header["pool"], Pool, 0)
    player.play(record.calls[0])
    assert player.pool.prefix.stats() == pool.prefix.stats() and pool.prefix.stats().again_queries == 1


def test_calls_of_threads_are_kept_in_their_order(tmp_path):
    pool = RecordedPool(400, 4, seed=1)

    def work():
        for _ in range(300):
            pool.close(pool.fork(parent := pool.open(5), 2))
            pool.close(parent)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.save(tmp_path / "calls") == 3600 and rerun(load(tmp_path / "calls")) is None


def test_damaged_files_are_refused_in_words_or_fail(tmp_path):
    path = tmp_path / "calls"
    life(2, 120).save(path)
    whole, options, rng = path.read_bytes(), load(path).header["pool"], random.Random(1)
    for cut in [0, 3, len(whole) - 9, *(rng.randrange(len(whole) - 1) for _ in range(60))]:
        path.write_bytes(whole[:cut])
        with pytest.raises(RecordError, match="calls"):
            load(path)
    header = {"kvpool": "0.1.0", "pool": {"num_blocks": 8, "block_size": 4}, "calls": 0, "lost": 0}
    no_option, no_pool = header["pool"] | {"record": 5}, header["pool"] | {"num_blocks": 0}
    for wrong in (header | {"pool": no_option}, header | {"pool": no_pool}, {"pool": header["pool"], "calls": 0}):
        path.write_text(json.dumps(wrong) + "\n")
        with pytest.raises(RecordError):
            rerun(load(path))
    for _ in range(400):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            record = load(path)
            if record.header["pool"] == options:
                rerun(record)
        except RecordError:
            continue


class Corrupting(kvpool.Pool):
    """A pool that loses a reference when a sequence is shortened to nothing."""

    def truncate(self, handles, lens):
        """Like the core's, wrong for a length of 0."""
        super().truncate(handles, lens)
        if 0 in np.atleast_1d(lens):
            corrupt(self, "num_used", 1)


def test_record_of_another_outcome_names_the_call(tmp_path):
    class OtherBlocks(BlockAPI):
        def evict(self, n):
            return super().evict(0)

    class Other(kvpool.Pool):
        @property
        def blocks(self):
            return OtherBlocks(self)

    life(3).save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    failure = rerun(record, Other)
    assert failure.kind == "digest" and failure.call.startswith("blocks.evict")
    with pytest.raises(RecordError, match="cannot be made smaller"):
        minimise(record, failure, Other)


def test_numbers_of_more_than_a_word_are_kept(tmp_path):
    pool = RecordedPool(80, 1 << 26, max_seqs=2, in_order=True)
    plan, (a, b) = Plan(pool, 2, 1 << 26, formats=()), (pool.open(5 << 29), pool.open())
    for _ in range(36):
        pool.step(plan, [a], 1 << 26)
    pool.step(plan, [a, b], [7, 1])
    lengths = [[(1 << 31) + 9, 1], (1 << 31) + 1, 1 << 31, (1 << 31) - 1, (1 << 29) + 1, 1 << 29, (1 << 29) - 1, 0]
    for length in lengths:
        pool.truncate([a, b] if length == lengths[0] else a, length)
    pool.save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    assert [call.arguments["lens"] for call in record.calls if call.name == "truncate"] == lengths
    assert record.calls[0].arguments["tokens"] == 5 << 29 and rerun(record) is None


def test_command_checks_a_record_and_refuses_a_damaged_one(tmp_path, capsys):
    path = tmp_path / "calls"
    life(3, 200).save(path)
    assert main(command, ["--ops", str(path)]) == 0
    assert "every digest as recorded" in capsys.readouterr().out
    assert main(command, ["--ops", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failure"] is None
    path.write_bytes(path.read_bytes()[:-9])
    assert main(command, ["--ops", str(path)]) == 2
    assert "calls: line" in capsys.readouterr().err
    assert main(command, ["--ops", str(tmp_path / "none")]) == 2
    assert main(command, ["--synthetic", "--ops", str(path)]) == 2


def test_command_prints_the_fewest_calls_that_fail(tmp_path, capsys, monkeypatch):
    path = tmp_path / "calls"
    life(1).save(path)
    record = load(path)
    failure = rerun(record, Corrupting, check_every=1)
    assert failure.kind == "corrupt" and failure.call.startswith("truncate")
    few = minimise(record, failure, Corrupting)
    assert few[-1].name == "truncate" and len(few) <= 4
    monkeypatch.setattr(rerun, "__defaults__", (Corrupting,))
    monkeypatch.setattr(minimise, "__defaults__", (Corrupting,))
    assert main(command, ["--ops", str(path), "--minimise"]) == 1
    out = capsys.readouterr().out
    assert "FAILED at call" in out and f"{len(few)} calls are enough" in out and str(few[-1]) in out


def test_close_deferred_inside_a_call_is_noted_after_it(tmp_path, monkeypatch):
    pool = RecordedPool(64, 4)
    held, note = [pool.open(5)], RecordedPool._note

    def noting(self, *args):
        if held:  # as a finalizer that runs between a call and its note
            self.defer_close(held.pop())
        note(self, *args)

    monkeypatch.setattr(RecordedPool, "_note", noting)
    pool.open(3)
    monkeypatch.undo()
    pool.open(3)
    assert [call.name for call in pool.calls] == ["open", "open", "defer_close", "open"]
    pool.save(tmp_path / "calls")
    assert rerun(load(tmp_path / "calls")) is None
