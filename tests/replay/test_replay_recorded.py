"""Calls that a `RecordedPool` kept: on a new pool they go the same way; damaged files, and the fewest that fail."""

import json
import random
import threading

import numpy as np
import pytest

import kvpool
from benchmarks.command import main
from benchmarks.replay import command
from benchmarks.replay.recorded import CALLS, Player, RecordedPool, RecordError, load, minimise, rerun
from kvpool import Group, Plan, Pool
from kvpool._core import BlockAPI
from kvpool.errors import KVPoolError
from tests.verify._hooks import corrupt


class Life:
    """A pool that lives a random life, every call of which changes something or is refused."""

    def __init__(self, seed, pool_type=RecordedPool, **options):
        self.rng = random.Random(seed)
        cached = seed % 2 == 0
        self.pool = pool_type(
            48, 4, max_seqs=12, max_blocks_per_seq=16, seed=seed, in_order=seed % 3 == 0,
            prefix_cache=cached, **options,
        )  # fmt: skip
        self.plans = [Plan(self.pool, 8, 64, formats=("block_tables",)) for _ in range(2)]
        self.open, self.ids, self.loads, self.cached = [], [], [], cached

    def some(self, things, most=4):
        return self.rng.sample(things, min(len(things), self.rng.randint(1, most)))

    def do(self, verb):
        pool, rng = self.pool, self.rng
        if verb == "open":
            tokens = [rng.randrange(3) for _ in range(rng.randrange(20))] if rng.random() < 0.6 else rng.randrange(9)
            self.open.append(pool.open(tokens, rng.choice([b"", b"tenant"])))
        elif verb == "load":
            self.loads.append(pool.open([rng.randrange(3) for _ in range(12)], load=True))
            self.open.append(self.loads[-1])
        elif verb == "loaded":
            pool.loaded(self.loads.pop(rng.randrange(len(self.loads))), rng.choice([0, 4, 12]))
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
            options = {"oldest": rng.random() < 0.5} if verb == "blocks.release" else {}
            getattr(pool.blocks, verb.removeprefix("blocks."))(self.some(self.ids), **options)
        elif verb == "reset":
            pool.reset()
            self.open, self.ids, self.loads = [], [], []

    def run(self, count, reset=0.0):
        verbs = [
            *("open", "step", "step", "again", "reserve", "done", "done", "rollback", "fork", "truncate", "close"),
            *("load", "loaded", "close_finished", "defer", "alloc", "free", "decref", "incref", "mark_cached", "evict"),
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
    kept = pool.save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    assert len(record.calls) == kept > 150 and record.header["lost"] == 0
    assert rerun(record, check_every=50) is None


@pytest.mark.parametrize("groups", [[Group.full()] * 2, [Group.full(columns=2)], [Group.window(4)]])
def test_pool_of_other_layer_groups_than_a_full_one_is_not_recorded(groups):
    with pytest.raises(ValueError, match="layer groups"):
        RecordedPool(16, 4, groups=groups)
    assert RecordedPool(16, 4, groups=[Group.full()]).options.groups == (Group.full(),)


def test_random_seed_may_be_given_again():
    for _ in range(64):
        assert Pool(2, 1, seed=(seed := Pool(2, 1).options.seed)).options.seed == seed


def test_recording_changes_nothing_else():
    with_record, without = Life(4).run(300), Life(4, Pool).run(300)
    assert with_record.digest() == without.digest() and with_record.fingerprint() == without.fingerprint()


@pytest.mark.parametrize("seed", [1, 2])  # in the others steps are done in order: no `done`
def test_every_call_that_changes_something_is_kept(seed, tmp_path):
    """The digest of the last call is the pool's, and a life meets every call of the list."""
    pool = Life(seed).run(4000, reset=0.01)
    made = {call.name for call in pool.calls}
    assert {name for name in CALLS if not name.startswith(("blocks.", "prefix."))} <= made
    assert next(call.digest for call in reversed(pool.calls) if call.digest is not None) == pool.digest()


def test_record_that_lost_its_beginning_says_so(tmp_path):
    pool = Life(1, keep=20).run(600)
    assert pool.save(tmp_path / "calls") == 20
    record = load(tmp_path / "calls")
    assert record.header["lost"] > 0
    with pytest.raises(RecordError, match=rf"the first {record.header['lost']} calls are lost"):
        rerun(record)


def test_arguments_of_every_kind_are_kept(tmp_path):
    """Buffers, an array for the result, a plan's own array, padding; refused ones are refused as ever, and not kept."""
    pool = RecordedPool(40, 4, max_seqs=9)
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
    assert pool.save(tmp_path / "calls") == 12 and rerun(load(tmp_path / "calls"), check_every=1) is None


def test_prompt_that_is_opened_again_is_counted_apart_in_a_replay_too(tmp_path):
    pool = RecordedPool(16, 4, prefix_cache=True)
    pool.open([1, 2, 3], again=True)
    pool.save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    player = Player(record.header["pool"], Pool, 0)
    for call in record.calls:
        player.play(call)
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
    Life(2).run(120).save(path)
    whole, options, rng = path.read_bytes(), load(path).header["pool"], random.Random(1)
    for cut in [0, 3, len(whole) - 9, *(rng.randrange(len(whole) - 1) for _ in range(60))]:
        path.write_bytes(whole[:cut])
        with pytest.raises(RecordError, match="calls"):
            load(path)
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


def test_failing_record_shrinks_to_the_calls_that_matter(tmp_path):
    Life(1).run(600).save(tmp_path / "calls")
    record = load(tmp_path / "calls")
    failure = rerun(record, Corrupting, check_every=1)
    assert failure.kind == "corrupt" and failure.call.startswith("truncate")
    few = minimise(record, failure, Corrupting)
    assert [call.name for call in few][-1] == "truncate" and len(few) <= 4


def test_record_of_another_outcome_names_the_call(tmp_path):
    class OtherBlocks(BlockAPI):
        def evict(self, n):
            return super().evict(0)

    class Other(kvpool.Pool):
        @property
        def blocks(self):
            return OtherBlocks(self)

    Life(1).run(600).save(tmp_path / "calls")
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
    Life(3).run(200).save(path)
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
    Life(1).run(600).save(path)
    monkeypatch.setattr(rerun, "__defaults__", (Corrupting,))
    monkeypatch.setattr(minimise, "__defaults__", (Corrupting,))
    assert main(command, ["--ops", str(path), "--minimise"]) == 1
    out = capsys.readouterr().out
    assert "FAILED at call" in out and "calls are enough" in out and "truncate(" in out


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


@pytest.mark.parametrize(
    "header",
    [
        {"kvpool": "0.1.0", "pool": {"num_blocks": 8, "block_size": 4, "record": 5}, "calls": 0, "lost": 0},
        {"kvpool": "0.1.0", "pool": {"num_blocks": 0, "block_size": 4}, "calls": 0, "lost": 0},
        {"pool": {"num_blocks": 8, "block_size": 4}, "calls": 0, "lost": 0},
    ],
)
def test_record_with_a_header_of_something_else_is_refused(tmp_path, header):
    path = tmp_path / "calls"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(RecordError):
        rerun(load(path))
