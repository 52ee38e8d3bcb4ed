"""Replicated pools on the ranks of `mx.distributed`: each computes its own tables, and eight bytes prove them equal.

With tensor parallelism every rank holds some of the KV heads of every block. A pool is deterministic: the same calls
give the same block ids, so each rank runs a pool of its own on the same requests, and no table is ever sent. What
remains is to notice when that stops being true. `Ranks.agree` compares `Pool.digest`, which chains every call and its
results, with one all-gather of eight bytes a rank:

    model.shard(group)                                # mlx-lm's own: KV heads / ranks
    with Ranks(group) as ranks, install(model, pool=Pool(4096, 16, seed=0)) as kv:
        while work:
            generator.next()
            ranks.agree(kv.pool, generator.stream)

Start it by `mlx.launch`, or by `kvpool.adapters.launch`. Needs nothing but mlx; pools must have the same ``seed=`` on
all ranks, and requests must come in the same order.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

import mlx.core as mx

from kvpool.errors import KVPoolError

TIMED_OUT = 70  # exit status of a rank that waited in vain


class RanksDisagree(KVPoolError, RuntimeError):
    """Pools that ought to be equal are not: tables differ from now on, so no rank may go on. Raised on every rank.

    Attributes
    ----------
    digests : tuple of int
        By rank.
    step : int
        Which comparison it was, from 1 on.
    """

    def __init__(self, message: str, digests: tuple[int, ...], step: int) -> None:
        super().__init__(message)
        self.digests = digests
        self.step = step


class RankLost(KVPoolError, RuntimeError):
    """Another rank is gone. The pool of this one is intact, the group is not."""


class Ranks:
    """The ranks of one group, and a watch over the calls that wait for all of them.

    Parameters
    ----------
    group : mlx.core.distributed.Group
    timeout : float, default 60
        Seconds that one `agree` may wait for the others. MLX's collective calls cannot be interrupted, so a rank
        that waits longer says so on stderr and ends its process with status 70 (`TIMED_OUT`).
    on_timeout : callable, optional
        Called with the message in place of that, on a thread of its own.

    Notes
    -----
    O(1) a step: 8 bytes a rank.
    """

    def __init__(
        self, group: Any, *, timeout: float = 60.0, on_timeout: Callable[[str], object] | None = None
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"[Ranks] timeout is {timeout}, it must be positive")
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.steps = 0
        self.timeout = timeout
        self._on_timeout = on_timeout or _end_process
        self._wake = threading.Condition()
        self._waiting_for = 0  # number of the comparison that is under way, 0: none
        self._is_closed = False
        self._watch = threading.Thread(target=self._watch_over, name="kvpool ranks", daemon=True)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the watch. Idempotent."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._watch.join()

    def agree(self, pool: Any, stream: Any = None) -> int:
        """Compare the digest of `pool` with those of the other ranks; returns it.

        Parameters
        ----------
        pool : kvpool.Pool
        stream : mlx.core.Stream, optional
            The one on which the model's own collectives run, the CPU's default stream by default. Collectives pair
            up in the order in which they are executed, and only within a stream is that the order of the program:
            from another stream this one could meet a sum of the model on the other rank.

        Raises
        ------
        RanksDisagree
            On every rank, if any two differ. Pools are unchanged.
        RankLost
            A rank has gone. The pool is unchanged.
        """
        digest = pool.digest()
        self._expect(self.steps + 1)
        try:
            halves = mx.array([digest >> 32, digest & 0xFFFFFFFF], mx.uint32)
            flat: Any = mx.distributed.all_gather(halves, group=self.group, stream=stream or mx.cpu).tolist()
        except RuntimeError as error:
            raise RankLost(
                f"[agree] rank {self.rank} of {self.size} lost another one in step {self.steps + 1}: {error}"
            ) from error
        finally:
            self._expect(0)
        self.steps += 1
        digests = tuple(high << 32 | low for high, low in zip(flat[::2], flat[1::2], strict=True))
        if len(set(digests)) > 1:
            shown = ", ".join(f"rank {rank} {value:016x}" for rank, value in enumerate(digests))
            raise RanksDisagree(
                f"[agree] pools differ in step {self.steps}: {shown}; every rank must make the same calls in the same "
                "order on a pool with the same sizes and seed",
                digests,
                self.steps,
            )
        return digest

    def _expect(self, step: int) -> None:
        with self._wake:
            self._waiting_for = step
            self._wake.notify()

    def _watch_over(self) -> None:
        with self._wake:
            while not self._is_closed:
                step = self._waiting_for
                in_time = self._wake.wait(self.timeout if step else None)
                if not in_time and self._waiting_for == step:
                    self._on_timeout(
                        f"[agree] rank {self.rank} of {self.size} has waited {self.timeout:g} s for the others in step "
                        f"{step}, the limit"
                    )
                    self._waiting_for = 0


def _end_process(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    os._exit(TIMED_OUT)
