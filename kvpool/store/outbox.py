"""`Outbox`: copies of blocks that wait to be written, within a limit, and the thread that writes them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import TIMEOUT_MAX, Condition, Thread
from traceback import walk_tb
from typing import NamedTuple

import numpy as np

from kvpool.store.blocks import Blocks, Rows
from kvpool.store.segment_format import expected_heads

_log = logging.getLogger(__name__)


class Failures:
    """Puts failures into a log, each kind once: a store that always raises would fill it."""

    def __init__(self) -> None:
        self._told: set[tuple[type, str, int]] = set()

    def tell(self, log: logging.Logger, text: str, error: BaseException) -> None:
        """Log an error with its traceback, unless one of its type came from the same line before."""
        *_, (frame, line) = walk_tb(error.__traceback__)
        kind = (type(error), frame.f_code.co_filename, line)
        if kind not in self._told:
            self._told.add(kind)
            log.error("%s; the log has each such failure once", text, exc_info=error)


class Waiting(NamedTuple):
    """A block that waits to be written."""

    name: int
    fields: bytes
    tokens: bytes
    row: np.ndarray
    key: bytes
    group: int


class Outbox:
    """A queue that drops what does not fit into `most_nbytes`, and one thread.

    The thread writes blocks, first in first out, one or `batch_nbytes` in a call. It calls `tick` at its start and then
    about every `tick_seconds`, and `end` last.
    """

    def __init__(
        self,
        write: Callable[[list[Waiting]], None],
        tick: Callable[[], None],
        end: Callable[[], None],
        most_nbytes: int,
        tick_seconds: float,
        batch_nbytes: int = 0,
    ) -> None:
        self._write, self._tick, self._end = write, tick, end
        self.batch_nbytes = batch_nbytes  # `write` may change it
        self._most_nbytes, self._tick_seconds = most_nbytes, min(tick_seconds, TIMEOUT_MAX)
        self._change = Condition()
        self._queue: deque[Waiting] = deque()
        self._names: set[int] = set()
        self._is_closed = False
        self._failures = Failures()
        self.nbytes = 0  # of what waits
        self.seconds = 0.0  # of CPU time, for writing
        self._thread = Thread(target=self._run, name="kvpool-store", daemon=True)
        self._thread.start()

    def put(self, layout: bytes, blocks: Blocks, rows: Rows, names: np.ndarray) -> tuple[int, int]:
        """Take copies of blocks; return how many it took, and how many of them wait already."""
        wanted, known = [], 0
        nbytes = len(rows[0]) if len(blocks) else 0
        with self._change:
            for number, name in enumerate(names.tolist()):
                if name in self._names:
                    known += 1
                elif not self._is_closed and self.nbytes + nbytes <= self._most_nbytes:
                    wanted.append((number, name))
                    self._names.add(name)
                    self.nbytes += nbytes
        try:
            heads = expected_heads(layout, blocks[[number for number, _ in wanted]], nbytes) if wanted else []
            items = [
                Waiting(name, *head, np.array(rows[number]), blocks.keys[number].tobytes(), blocks.group)
                for (number, name), head in zip(wanted, heads, strict=True)
            ]
        except BaseException:  # there may be no memory for copies
            with self._change:
                self._names.difference_update(name for _, name in wanted)
                self.nbytes -= nbytes * len(wanted)
                self._change.notify_all()
            raise
        with self._change:
            self._queue.extend(items)
            self._change.notify_all()
        return len(wanted), known

    def drain(self, timeout: float) -> bool:
        """Wait until nothing waits."""
        with self._change:
            return self._change.wait_for(lambda: not self._names or not self._thread.is_alive(), timeout)

    def close(self, timeout: float) -> int:
        """Take no more, and let the thread write what waits, for so many seconds. Return how many blocks it drops."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join(timeout)
        with self._change:
            late = list(self._queue)
            self._queue.clear()
            self._names.difference_update(item.name for item in late)
            self.nbytes -= sum(item.row.nbytes for item in late)
            self._change.notify_all()
        return len(late)

    def _run(self) -> None:
        ticked = -float("inf")
        while True:
            if time.monotonic() - ticked >= self._tick_seconds:
                self._guarded(self._tick)
                ticked = time.monotonic()
            with self._change:
                if not self._queue:
                    if self._is_closed and not self._names:  # else a `put` that began earlier makes its copies
                        break
                    self._change.wait(max(ticked + self._tick_seconds - time.monotonic(), 0.001))
                items = self._batch()
            if not items:
                continue
            began = time.thread_time()
            self._guarded(self._write, items)
            with self._change:
                self._names.difference_update(item.name for item in items)
                self.nbytes -= sum(item.row.nbytes for item in items)
                self.seconds += time.thread_time() - began
                self._change.notify_all()
        self._guarded(self._end)

    def _batch(self) -> list[Waiting]:
        """Take what is written next from the queue. With the lock."""
        items: list[Waiting] = []
        left = self.batch_nbytes
        while self._queue and (not items or left >= self._queue[0].row.nbytes):
            items.append(self._queue.popleft())
            left -= items[-1].row.nbytes
        return items

    def _guarded(self, call: Callable[..., None], *given: list[Waiting]) -> None:
        """Call it. If it fails, log that and go on, so that the next blocks are written."""
        try:
            call(*given)
        except Exception as error:
            self._failures.tell(_log, "[store] a block was not written, or the store not looked at", error)
