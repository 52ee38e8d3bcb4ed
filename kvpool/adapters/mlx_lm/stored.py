"""`StoredPrefixes`: prefixes of prompts that come from a `BlockStore`, and go there when they were computed.

The thread that runs the model never waits for the store. One thread looks up and reads, another one names and writes.
`StoredPrefixes.move` moves bytes between them and the pool, some of them between two steps:

1. A load takes blocks (``pool.open(..., load=True)``), fills them as they come, and makes them known. They are cached
   then, and the prompt finds them like any others. What comes too late, or never, is computed.
2. A save holds the blocks of a prefix (``pool.prefix.pin``), copies those that the store lacks, and lets go.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten

from kvpool.errors import OutOfBlocks, OutOfSequences, PoolClosed
from kvpool.groups import Group
from kvpool.metrics import Metric
from kvpool.store import BlockLayout, Blocks, BlockStore, Layout, leading
from kvpool.store.outbox import Failures
from kvpool.store.tiers import lacking

MOST_LOADS = 4  # that have blocks at a time
MOST_SAVES = 8  # at a time
FIRST_SLICE, MOST_SLICE = 2**20, 2**23  # bytes that are read together: the first, and the largest
STAGED = 2**28  # bytes between a thread of the store and the pool
STEP_NBYTES = 2**25  # that a step copies into the pool, while others run
SAVE_SHARE = 0.01  # of the time of steps, that saves may take, the copy and the write together
MOST_CREDIT = 1.0  # seconds of it that may be left for later
PINNED_SHARE = 0.125  # of the pool, that saves may hold
TOLERANCE = 0.03  # of the time that computing takes: how far a load may be behind it
PATIENCE = 10.0  # seconds that a load may bring nothing, as long as nobody knows how fast the model computes

StoreFactory = Callable[[Layout], BlockStore]
_log = logging.getLogger(__name__)


class StoredStats(NamedTuple):
    """Counters of `StoredPrefixes`."""

    loads: int = 0  #: prefixes that were loaded, at least in part
    loaded_tokens: int = 0  #: of these
    late_loads: int = 0  #: abandoned because computing was faster
    dropped_loads: int = 0  #: abandoned because the pool needed their blocks, or because their request ended
    computed_loads: int = 0  #: not begun: computing is faster, or there was no room
    saves: int = 0  #: prefixes of which blocks were given to the store
    saved_blocks: int = 0  #: of these
    dropped_saves: int = 0  #: abandoned because blocks were short, or not begun: others held many, or a pause


_METRICS = {
    "loads": "Prefixes that came from the store, at least in part.",
    "loaded_tokens": "Tokens of these.",
    "late_loads": "Loads abandoned because computing was faster.",
    "dropped_loads": "Loads abandoned because the pool needed their blocks, or because their request ended.",
    "computed_loads": "Loads not begun: computing is faster, or there was no room.",
    "saves": "Prefixes of which blocks were given to the store.",
    "saved_blocks": "Blocks of these.",
    "dropped_saves": "Saves abandoned because blocks were short, or not begun: others held many, or a pause.",
}
_TIER_METRICS = {
    "blocks": ("gauge", "Blocks that a tier has."),
    "nbytes": ("gauge", "Bytes that a tier takes."),
    "limit_nbytes": ("gauge", "Bytes that a tier may take now, 0 if the limit is another's."),
    "reserve_nbytes": ("gauge", "Free bytes of the disk that a tier leaves to others."),
    "queued_nbytes": ("gauge", "Bytes that wait to be written."),
    "hits": ("counter", "Blocks loaded from a tier."),
    "hit_nbytes": ("counter", "Bytes of these."),
    "misses": ("counter", "Blocks that a tier was asked for and did not have."),
    "damaged": ("counter", "Records that are not what their name says."),
    "stored_nbytes": ("counter", "Bytes of blocks that a tier took."),
    "written_nbytes": ("counter", "Bytes that a tier wrote for them."),
    "dropped": ("counter", "Blocks that a tier did not take, or lost before they were written."),
    "evicted": ("counter", "Blocks that left a tier to make room."),
    "errors": ("counter", "Calls of the system or the server that failed."),
}


class Part(NamedTuple):
    """Blocks of one layer group: which ones of a prompt they are, int64 ``[n]``."""

    group: int
    at: np.ndarray


@dataclass(eq=False, slots=True)
class _Load:
    """A prefix on its way from the store. `found`, `names` and `is_read` are set by the thread that reads."""

    id: Hashable
    tokens: np.ndarray
    namespace: bytes
    own: bytes  # the namespace of the pool
    since: float
    latest: float  # when something came
    begin: int  # tokens that the pool had
    names: tuple[Blocks, ...] = ()
    found: int = -1  # tokens that the store has; -1: not known yet
    handle: int = -1
    nbytes: int = 0
    began: float = 0.0
    come: deque[tuple[Part, np.ndarray, int]] = field(default_factory=deque)  # slices, and how many blocks were read
    num_come: int = 0
    is_read: bool = False
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Save:
    """A prefix that is held until the store has it. `lacking` is set by the thread that writes."""

    tokens: np.ndarray
    namespace: bytes
    handle: int
    parts: list[Part]
    names: tuple[Blocks, ...] = ()
    lacking: deque[Part] | None = None


class _Worker:
    """A thread that makes calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failures = Failures()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None] | None) -> None:
        """Make a call. None: end the thread."""
        self._calls.put(call)

    def join(self, timeout: float) -> None:
        """End the thread and wait for it."""
        self._calls.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failures.tell(_log, "[store] a call of the store failed", error)


class StoredPrefixes:
    """Loads and saves prefixes of one model. One thread at a time may use it: the one that runs the model.

    Parameters
    ----------
    kv
        A `PagedKV` with a prefix cache. When it is collected without `close`, loads and saves end.
    store : BlockStore or callable
        A store with the layout of the model, or what makes one of a `Layout`.
    """

    def __init__(self, kv: Any, store: BlockStore | StoreFactory) -> None:
        self.layout = layout_of(kv)
        self.store: BlockStore = store(self.layout) if callable(store) else store
        if self.store.layout.digest != self.layout.digest:
            raise ValueError("[install] the store has another layout than the model: other weights, blocks or bits")
        self._pool = kv.pool
        self._arenas = kv.arenas
        self._groups: tuple[Group, ...] = self._pool.options.groups
        self._sizes = [group.block_size for group in self.layout.groups]
        self._grain = max(self._sizes)
        self._needs_checkpoints = any(group.kind != "full" for group in self._groups)
        self._first_id = self._pool.options.reserved_blocks
        self._longest_sequence = self._pool.options.max_blocks_per_seq * self._pool.block_size
        self._reader, self._writer = _Worker("kvpool-store-read"), _Worker("kvpool-store-write")
        self._news = threading.Condition()
        self._staged = self._queued = 0  # bytes that were read and not imported, exported and not written
        self._loads: dict[Hashable, _Load] = {}
        self._ended: list[Hashable] = []  # loads, until the next `take_ended`
        self._saves: deque[_Save] = deque()
        self._counts = StoredStats()
        self._prefill = _Rate()  # tokens
        self._read = _Rate()  # bytes
        self._export = _Rate()  # bytes
        self._credit = 0.0  # seconds that saves may take
        self._written = 0.0  # seconds of CPU that writing took, not yet taken from the credit
        self._write_seconds = 0.0  # of the threads of the store, up to now
        self._is_closed = False
        # The collector may run inside a call of the pool, so the thread that writes does it.
        weakref.finalize(kv, self._writer.put, self.abandon).atexit = False

    def stats(self) -> StoredStats:
        """Counters."""
        return self._counts

    def metrics(self) -> list[Metric]:
        """The counters, and those of each tier of the store, for `kvpool.metrics`. Any thread may ask."""
        own = [
            Metric(f"kvpool_store_{name}_total", "counter", text, (({}, value),))
            for (name, text), value in zip(_METRICS.items(), self._counts, strict=True)
        ]
        tiers = self.store.stats()
        for name, (kind, text) in _TIER_METRICS.items():
            suffix = "_total" if kind == "counter" else ""
            samples = tuple(({"tier": tier}, getattr(stats, name)) for tier, stats in tiers.items())
            own.append(Metric(f"kvpool_store_tier_{name}{suffix}", kind, text, samples))
        return own

    # -- loads

    def begin(self, id: Hashable, tokens: np.ndarray, namespace: bytes, own: bytes) -> bool:
        """Look for a prefix of a prompt in the store. False: the pool has it, so there is nothing to wait for.

        `namespace` is that of the store, `own` that of the pool. The load ends when `take_ended` returns its id.
        """
        self.drop(id)
        most = (len(tokens) - 1) // self._grain * self._grain
        if self._is_closed or not most or (cached := self._pool.prefix.match(tokens, own)) >= most:
            return False
        now = time.monotonic()
        load = self._loads[id] = _Load(id, tokens[: most + 1], namespace, own, now, now, cached)
        self._reader.put(partial(self._look, load))
        return True

    def drop(self, id: Hashable) -> None:
        """Give a load up, if it is one."""
        if id in self._loads:
            self._count(dropped_loads=1)
            self._end(self._loads[id], 0)
        if id in self._ended:
            self._ended.remove(id)

    def take_ended(self) -> list[Hashable]:
        """Return the loads that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def move(self, runs: bool) -> None:
        """Move bytes, only some of them if others run meanwhile."""
        budget = STEP_NBYTES if runs else 2**62
        for load in list(self._loads.values()):
            if load.handle < 0 <= load.found:
                self._open(load, runs)
            if load.handle >= 0:
                budget -= self._import(load, budget)
            if load.id in self._loads and self._is_late(load):
                self._count(late_loads=1)
                self._end(load, self._usable(load))
        self._export_some(runs)

    def wait(self, timeout: float) -> None:
        """Wait for something to come from the store."""
        with self._news:
            self._news.wait_for(self._has_news, timeout)

    def _has_news(self) -> bool:
        has_come = any(load.come or load.is_read or load.handle < 0 <= load.found for load in self._loads.values())
        return has_come or self._can_export()

    def load_now(self, tokens: np.ndarray, namespace: bytes, own: bytes) -> None:
        """Load what the store has of a prompt, and wait for it."""
        if self.begin(key := object(), tokens, namespace, own):
            try:
                while key in self._loads:
                    self.move(runs=False)
                    self.wait(0.01 if key in self._loads else 0)
            finally:  # a copy may fail, and a key of the user end the wait
                self.drop(key)

    def _look(self, load: _Load) -> None:
        """Find out how much the store has. In the thread that reads."""
        found = 0
        try:
            if not load.is_over:
                load.names = self.layout.blocks(load.tokens[:-1], load.namespace)
                found = self._longest([self.store.lookup(names) for names in load.names])
        finally:
            with self._news:
                load.found = found
                self._news.notify()

    def _longest(self, found: list[np.ndarray]) -> int:
        """Return the largest hit for which the store has all that it needs."""
        kinds = list(zip(self._groups, self._sizes, found, strict=True))
        most = min((leading(mask) * size for group, size, mask in kinds if group.kind == "full"), default=2**62)
        most = min(most, max(len(mask) * size for _, size, mask in kinds)) // self._grain * self._grain
        if not self._needs_checkpoints:
            return most
        lengths = np.arange(most, 0, -self._grain)
        has_all = np.ones(len(lengths), bool)
        for group, size, mask in kinds:
            missing = np.concatenate([[0], np.cumsum(~mask)])  # among the first n blocks
            kept, first, last = _needed(group, size, lengths)
            has_all &= missing[kept] + missing[last] - missing[first] == 0
        return int(lengths[has_all.argmax()]) if has_all.any() else 0

    def _open(self, load: _Load, runs: bool) -> None:
        """Take blocks for a load and begin to read, or give it up."""
        cached = self._pool.prefix.match(load.tokens, load.own)
        new = load.found - cached
        tokens = load.tokens[: load.found]
        nbytes = 0
        for group, layout in zip(self._groups, self.layout.groups, strict=True):
            kept, first, last = _needed(group, layout.block_size, load.found)
            nbytes += layout.nbytes * (last - first + min(kept, first))
        is_slow = self._prefill.known and self._read.known and nbytes / self._read.value > new / self._prefill.value
        if new <= 0 or is_slow:
            if is_slow:
                self._read.doubt()
            self._count(computed_loads=int(new > 0))
            self._end(load, 0)
            return
        if sum(other.handle >= 0 for other in self._loads.values()) >= MOST_LOADS:
            return
        try:
            load.handle = self._pool.open(tokens, load.own, load=True)
        except (OutOfBlocks, OutOfSequences):
            if not runs:  # nobody will make room
                self._count(computed_loads=1)
                self._end(load, 0)
            return
        load.begin = self._pool.num_tokens(load.handle)
        parts = self._parts(load.handle, load.begin, load.found)
        load.nbytes = sum(self._nbytes(part) for part in parts)
        load.began = time.monotonic()
        self._reader.put(partial(self._fetch, load, parts))

    def _parts(self, handle: int, begin: int, end: int) -> list[Part]:
        """Return the blocks that a sequence of `end` tokens has, those of full groups behind the first `begin`."""
        found = []
        for number, (group, size) in enumerate(zip(self._groups, self._sizes, strict=True)):
            if group.kind == "state":
                has_state = len(self._pool.prefix.bundle(handle, number)) > 0
                found.append(Part(number, np.arange(end // size - has_state, end // size)))
                continue
            table = self._pool.table(handle, number).reshape(-1, group.columns)[: end // size, 0]
            at = np.flatnonzero(table >= self._first_id)
            found.append(Part(number, at[at >= begin // size] if group.kind == "full" else at))
        return found

    def _ids(self, handle: int, part: Part) -> np.ndarray:
        """Return where blocks of a sequence are now, int32 ``[n, columns]``."""
        if self._groups[part.group].kind == "state":
            return self._pool.prefix.bundle(handle, part.group).reshape(len(part.at), -1)
        return self._pool.table(handle, part.group).reshape(-1, self._groups[part.group].columns)[part.at]

    def _nbytes(self, part: Part) -> int:
        return len(part.at) * self.layout.groups[part.group].nbytes

    def _slices(self, part: Part, nbytes: int) -> Iterator[Part]:
        """Cut blocks into slices of so many bytes, and more later on."""
        at = 0
        while at < len(part.at):
            end = at + max(1, nbytes // self.layout.groups[part.group].nbytes)
            yield Part(part.group, part.at[at:end])
            at, nbytes = end, min(2 * nbytes, MOST_SLICE)

    def _fetch(self, load: _Load, parts: list[Part]) -> None:
        """Read the blocks of a load, slice by slice. In the thread that reads."""
        try:
            for part in (one for whole in parts for one in self._slices(whole, FIRST_SLICE)):
                rows, count = np.empty((len(part.at), self.layout.groups[part.group].nbytes), np.uint8), 0
                with self._news:
                    self._news.wait_for(lambda: load.is_over or self._staged < STAGED)
                    if load.is_over:
                        return
                    self._staged += rows.nbytes
                try:
                    count = leading(self.store.load(load.names[part.group][part.at], rows))
                finally:
                    with self._news:
                        if load.is_over:
                            self._staged -= rows.nbytes
                        else:
                            load.come.append((part, rows, count))
                        self._news.notify()
                if count < len(part.at):
                    return
        finally:
            with self._news:
                load.is_read = True
                self._news.notify()

    def _import(self, load: _Load, budget: int) -> int:
        """Copy into the pool what has come. Return how many bytes that was. End a load that is complete."""
        moved = 0
        while load.come and moved < budget:
            part, rows, count = load.come[0]
            try:
                if count:
                    ids = self._ids(load.handle, part)[:count]
                    arena = self._arenas[self._groups[part.group].arena]
                    arena.import_blocks(ids.ravel(), rows[:count].reshape(ids.size, -1))
            except BaseException:  # what comes behind it would be counted in its place
                self._end(load, self._usable(load))
                raise
            load.come.popleft()
            load.num_come += rows[:count].nbytes
            load.latest = time.monotonic()
            moved += rows.nbytes
            with self._news:
                self._staged -= rows.nbytes
                self._news.notify()
        if load.is_read and not load.come:
            self._read.add(load.num_come, time.monotonic() - load.began)
            self._end(load, self._usable(load))
        return moved

    def _usable(self, load: _Load) -> int:
        """Return the length up to which a load has what the pool needs."""
        if load.num_come == load.nbytes:
            return load.found
        if self._needs_checkpoints or len(self._groups) > 1:
            return 0
        return load.begin + load.num_come // self.layout.groups[0].nbytes * self._sizes[0]

    def _is_late(self, load: _Load) -> bool:
        """Whether a load is behind computing. If it ends now, load and rest take `TOLERANCE` longer than computing."""
        now = time.monotonic()
        if not self._prefill.known:
            return now - load.latest > PATIENCE
        come = (load.found - load.begin) * load.num_come / max(1, load.nbytes)
        spare = max(TOLERANCE * (len(load.tokens) - load.begin) / self._prefill.value, 0.02)
        return now - load.since > come / self._prefill.value + spare

    def _end(self, load: _Load, length: int) -> None:
        """End a load: the first `length` tokens have come."""
        self._stop(load)
        del self._loads[load.id]
        self._ended.append(load.id)
        if load.handle < 0:
            return
        length = length if length > load.begin else 0
        self._pool.loaded(load.handle, length)
        length = self._pool.num_tokens(load.handle)  # 0 after a flush
        if length > load.begin:
            begin = self._pool.prefix.committed(load.handle)
            self._pool.prefix.commit(load.handle, load.tokens[begin:length])
            self._count(loads=1, loaded_tokens=length - load.begin)
        self._pool.close(load.handle)

    def _stop(self, load: _Load) -> None:
        with self._news:
            load.is_over = True
            self._staged -= sum(rows.nbytes for _, rows, _ in load.come)
            load.come.clear()
            self._news.notify()

    def let_go(self) -> None:
        """Give back the blocks that loads and saves hold."""
        self.end_loads()
        while self._saves:
            self._count(dropped_saves=1)
            self._pool.close(self._saves.popleft().handle)

    def end_loads(self) -> None:
        """End all loads with what has come so far."""
        for load in list(self._loads.values()):
            self._count(dropped_loads=1)
            self._end(load, self._usable(load))

    # -- saves

    def save(self, tokens: np.ndarray, namespace: bytes, own: bytes, begin: int = 0) -> int:
        """Give the store what the pool has of these tokens, and return how many it has.

        The first `begin` tokens were saved before.
        """
        if self._is_closed:
            return begin
        if getattr(self.store, "is_paused", False):  # it would drop what is copied now
            self._count(dropped_saves=1)
            return begin
        try:
            handle = self._pool.prefix.pin(tokens[: self._longest_sequence], own)
        except (OutOfBlocks, OutOfSequences):  # a pin takes a sequence, and a slot of each state group
            return begin
        try:
            length = self._pool.num_tokens(handle)
            parts = self._parts(handle, begin, length) if length > begin else []
        except BaseException:
            self._pool.close(handle)
            raise
        save = _Save(tokens[:length], namespace, handle, parts)
        is_empty = not any(len(part.at) for part in parts)
        if is_empty or not self._has_room(save):  # an older save may be the prefix without which this one is worthless
            self._count(dropped_saves=int(not is_empty))
            self._pool.close(handle)
            return begin
        self._saves.append(save)
        self._writer.put(partial(self._compare, save))
        return length

    def _has_room(self, save: _Save) -> bool:
        """Whether a save may hold its blocks beside the others. One alone may hold any number."""
        held = sum(self._ids(one.handle, part).size for one in (*self._saves, save) for part in one.parts)
        within = len(self._saves) < MOST_SAVES and held <= PINNED_SHARE * self._pool.num_blocks
        return not self._saves or within

    def note(self, seconds: float, chunk: int) -> None:
        """Tell how long a step took, and how many tokens of prompts it computed."""
        with self._news:
            written, self._written = self._written, 0.0
        self._credit = min(self._credit + SAVE_SHARE * seconds - written, MOST_CREDIT)
        if chunk:
            self._prefill.add(chunk, seconds)

    @property
    def num_loads(self) -> int:
        """Loads that have begun and not ended."""
        return len(self._loads)

    @property
    def is_saving(self) -> bool:
        """Whether blocks are to be copied for the store."""
        return bool(self._saves)

    def _compare(self, save: _Save) -> None:
        """Find out what the store lacks. In the thread that writes."""
        slices: deque[Part] = deque()
        try:
            save.names = self.layout.blocks(save.tokens, save.namespace)
            for part in save.parts:
                new = Part(part.group, part.at[lacking(self.store, save.names[part.group][part.at])])
                slices.extend(self._slices(new, FIRST_SLICE))
        finally:
            with self._news:
                save.lacking = slices
                self._news.notify()

    def _export_some(self, runs: bool) -> None:
        """Copy blocks for the writer. If others run, as far as the time of steps allows."""
        most = self._queued + STEP_NBYTES
        while self._can_export() and self._queued < most:
            save = self._saves[0]
            assert save.lacking is not None
            if save.lacking:
                part = save.lacking[0]
                nbytes = self._nbytes(part)
                if runs and self._export.known and self._credit < min(nbytes / self._export.value, MOST_CREDIT):
                    return
                save.lacking.popleft()
                self._export_one(save, part, nbytes)
            if not save.lacking:
                self._count(saves=1)
                self._pool.close(self._saves.popleft().handle)

    def _can_export(self) -> bool:
        """Whether the oldest save is known, and the writer is not too far behind."""
        return bool(self._saves) and self._saves[0].lacking is not None and self._queued < STAGED

    def _export_one(self, save: _Save, part: Part, nbytes: int) -> None:
        began = time.monotonic()
        arena, ids = self._arenas[self._groups[part.group].arena], self._ids(save.handle, part)
        rows = arena.export_blocks(ids.ravel()).reshape(len(part.at), -1)
        seconds = time.monotonic() - began
        self._export.add(nbytes, seconds)
        self._credit -= seconds
        with self._news:
            self._queued += nbytes
        self._count(saved_blocks=len(part.at))
        self._writer.put(partial(self._give, save.names[part.group][part.at], rows))

    def _give(self, names: Blocks, rows: np.ndarray) -> None:
        """Give blocks to the store. In the thread that writes."""
        began = time.thread_time()  # a server may let this thread wait: that costs nobody anything
        write_seconds = self._write_seconds
        try:
            self.store.store(names, rows)
            write_seconds = sum(tier.write_seconds for tier in self.store.stats().values())
        finally:
            with self._news:
                self._queued -= rows.nbytes
                self._written += time.thread_time() - began + write_seconds - self._write_seconds
                self._write_seconds = write_seconds
                self._news.notify()

    def export(self, timeout: float = 10.0) -> None:
        """Copy everything that is to be saved, so that the pool needs to hold it no longer."""
        end = time.monotonic() + timeout
        while self._saves and time.monotonic() < end:
            self._export_some(runs=False)
            self.wait(0.01 if self._saves else 0)

    def flush(self, timeout: float = 10.0) -> None:
        """Copy everything that is to be saved, and wait until the store has it."""
        end = time.monotonic() + timeout
        self.export(timeout)
        written = threading.Event()
        self._writer.put(written.set)
        written.wait(max(0.0, end - time.monotonic()))
        self.store.drain(max(0.0, end - time.monotonic()))

    # -- the end

    def forget(self) -> None:
        """Forget all loads and saves: the pool was reset."""
        for load in self._loads.values():
            self._stop(load)
        self._loads.clear()
        self._saves.clear()
        self._ended.clear()

    def abandon(self) -> None:
        """Load and save nothing more, not even what is on its way."""
        self._is_closed = True
        try:
            self.let_go()
        except PoolClosed:
            self.forget()
        for worker in (self._reader, self._writer):
            worker.put(None)
        self.store.close()

    def close(self) -> None:
        """Give all loads up, save what is left, and close the store."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for id in list(self._loads):
                self.drop(id)
            self.flush()
        finally:  # there may be no memory for a copy, and a user who waits no longer
            self.abandon()
            for worker in (self._reader, self._writer):
                worker.join(1.0)

    def _count(self, **more: int) -> None:
        self._counts = self._counts._replace(**{name: getattr(self._counts, name) + n for name, n in more.items()})


class _Rate:
    """Work done per second, as measured lately."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def known(self) -> bool:
        """Whether something was measured."""
        return self._amount > 0

    @property
    def value(self) -> float:
        return self._amount / max(self._seconds, 1e-9)

    def add(self, amount: float, seconds: float) -> None:
        self._amount = 0.8 * self._amount + amount
        self._seconds = 0.8 * self._seconds + seconds

    def doubt(self) -> None:
        """Take it for faster than it was: what is not done any more is not measured again."""
        self._seconds *= 0.8


def _needed(group: Group, size: int, length: Any) -> tuple[Any, Any, Any]:
    """Return which blocks of a group a prompt of this length, or of each of these, begins with.

    They are the first ``kept`` ones, and those from ``first`` up to ``last``.
    """
    last = length // size
    if group.kind == "state":
        return 0 * last, last - 1, last
    if group.kind == "full":
        return 0 * last, 0 * last, last
    begin = np.maximum(length - group.size + 1, 0) if group.kind == "window" else length // group.size * group.size
    return np.minimum(-(-group.keep // size), last), begin // size, last


def layout_of(kv: Any) -> Layout:
    """Return what a store holds for a model: the bytes of its layer groups, and which weights they belong to."""
    layout, pool = kv.layout, kv.pool
    sizes = [group.block_size or pool.block_size for group in pool.options.groups if group.kind != "state"]
    grain, groups = max(sizes, default=pool.block_size), []
    for group in pool.options.groups:
        if group.kind == "state":
            states = [layout.leaves[leaf].arrays for leaf in layout.held]
            groups.append(BlockLayout(grain, group.blocks * layout.block_nbytes[0], f"state {states}"))
            continue
        # Rows have the order of `export_blocks` whatever the backend chooses, so its choice makes no other store.
        own = (spec for spec, arena in zip(layout.specs, layout.arenas, strict=True) if arena == group.arena)
        specs = [spec.in_layout("NHD") for spec in own]
        nbytes = group.columns * layout.block_nbytes[group.arena]
        text = f"{group.kind} {group.size} {group.keep} {specs}"
        groups.append(BlockLayout(group.block_size or pool.block_size, nbytes, text))
    return Layout(tuple(groups), fingerprint(kv.model), pool.block_size)


def fingerprint(model: Any) -> bytes:
    """Return 32 bytes that stand for the weights of a model, and for what computes with them."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    arrays = [(name, _bytes_of(parameters[name])) for name in sorted(parameters)]
    with ThreadPoolExecutor() as pool:  # hashing does not hold the GIL
        hashes = list(pool.map(_hashed, arrays))
    what = (version("mlx"), mlx_lm.__version__, str(mx.default_device()), repr(getattr(model, "args", "")))
    return hashlib.sha256(b"".join([repr(what).encode(), *hashes])).digest()


def _bytes_of(array: mx.array) -> tuple[str, np.ndarray]:
    """Return shape and dtype of an array, and its bytes, which are not copied where they lie in order."""
    flat = array.reshape(-1)
    return f"{array.dtype} {array.shape}", np.asarray(flat.view(mx.uint8) if array.size else flat)


def _hashed(named: tuple[str, tuple[str, np.ndarray]]) -> bytes:
    name, (kind, data) = named
    known = hashlib.sha256(f"{name} {kind}".encode())
    known.update(np.ascontiguousarray(data).data)
    return known.digest()
