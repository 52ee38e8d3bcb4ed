"""Replicated pools on the ranks of `mx.distributed`: each computes its own tables, and eight bytes compare them.

With tensor parallelism every rank holds some of the KV heads of every block. A pool is deterministic: the same calls
give the same block ids. So each rank runs its own pool on the same requests, and no table is ever sent. `Ranks.step`
detects ranks that differ before they run collective operations that do not match: it compares `Pool.digest`, which
chains every call and its results, and a hash of the batch. Then it watches over the forward pass that follows:

    model.shard(group)                                # mlx-lm's own: KV heads / ranks
    with Ranks(group) as ranks, install(model, pool=Pool(4096, 16, seed=0)) as kv:
        while work:
            with ranks.step(kv.pool, batch=requests_and_their_last_tokens, stream=generator.stream):
                generator.next()

Start it by `mlx.launch`, with the same ``seed=`` and the same order of requests everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import mlx.core as mx
import numpy as np

from kvpool.adapters import warn_if_untested
from kvpool.errors import KVPoolError

RELEASES = ("0.31.2", "0.33")  # of mlx: the oldest that the tests run, and the first that they do not
TIMED_OUT = 70  # exit status of a rank that waited in vain
BACKENDS = ("[ring]", "[mpi]", "[jaccl]", "[nccl]", "[distributed]")  # how errors of MLX's collectives begin


class RanksDisagree(KVPoolError, RuntimeError):
    """Pools or batches of the ranks differ, so no rank may go on. Every rank raises.

    `digests` has what differs, by rank. `step` is the number of the comparison, from 1 on.
    """

    def __init__(self, message: str, digests: tuple[int, ...], step: int) -> None:
        super().__init__(message)
        self.digests, self.step = digests, step


class RankLost(KVPoolError, RuntimeError):
    """Another rank is gone. The pool of this rank is intact, the group is not."""


class Ranks:
    """The ranks of one group, with a watchdog for calls that wait for all of them. O(1) a step: 8 bytes a rank.

    Parameters
    ----------
    group : mlx.core.distributed.Group
    timeout : float, default 60
        Seconds that one `agree`, or the body of one `step`, may take. MLX's collective calls cannot be interrupted.
        So a rank that takes longer says so on stderr and ends its process with status 70 (`TIMED_OUT`), even if it
        is only slow. Choose several times the slowest step, often the first (it compiles) or a long prompt.
    on_timeout : callable, optional
        Called with the message instead, on a thread of its own.
    """

    def __init__(self, group: Any, *, timeout: float = 60.0, on_timeout: Callable[[str], Any] | None = None) -> None:
        warn_if_untested("Ranks", "mlx", vars(mx)["__version__"], *RELEASES)
        if not timeout > 0:
            raise ValueError(f"[Ranks] timeout is {timeout}, it must be positive")
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.steps = 0
        self.timeout = min(timeout, threading.TIMEOUT_MAX)
        self._on_timeout = on_timeout or _end_process
        self._wake = threading.Condition()
        self._waiting: tuple[str, int] | None = None  # call and number of the step that is under way
        self._is_closed = False
        self._watch = threading.Thread(target=self._watch_over, name="kvpool ranks", daemon=True)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._watch.join()

    @contextlib.contextmanager
    def step(self, pool: Any, *, batch: Any = None, stream: Any = None) -> Iterator[int]:
        """`agree`, then the forward pass in the body, which may take `timeout` seconds in total.

        Yields the digest. Raises what `agree` raises, before the body runs. An error of MLX's collectives in the body
        is `RankLost`, too. A pending step then stays pending.
        """
        digest = self.agree(pool, stream, batch=batch)
        with self._watched("step", self.steps):
            yield digest

    def agree(self, pool: Any, stream: Any = None, *, batch: Any = None) -> int:
        """Compare the digest of `pool`, and the batch if there is one, with the other ranks'; returns the digest.

        Parameters
        ----------
        pool : kvpool.Pool
        stream : mlx.core.Stream, optional
            The stream of the model's own collectives, by default the CPU's default stream. Collectives pair up in
            the order in which they are executed, which is the order of the program only within a stream. On another
            stream this call could pair with a sum of the model on the other rank.
        batch : bytes or integers of any shape, optional
            Data that decides the shapes of the next forward pass and is not in the pool yet: for an engine that
            plans by itself, its requests and the last token of each. A planned step is in the digest already.

        Raises
        ------
        RanksDisagree
            On every rank, if any two differ. Pools are unchanged.
        RankLost
            A rank has gone. The pool is unchanged.
        TypeError
            `batch` is something else. The pool is unchanged; the other ranks, which wait, raise `RanksDisagree`.
        """
        digest, step, wrong = int(pool.digest()), self.steps + 1, None
        try:
            mixed = digest if batch is None else digest ^ _hash(batch)
        except Exception as error:
            mixed, wrong = int.from_bytes(os.urandom(8)), error  # a value that no other rank has
        with self._watched("agree", step):
            values, what = self._gather(mixed, stream), "batches"
            if differ := len(set(values)) > 1:  # on every rank, so all are here to say which of the two it is
                pools = self._gather(digest, stream)
                values, what = (pools, "pools") if len(set(pools)) > 1 else (values, what)
        self.steps = step
        if wrong is not None:
            raise TypeError(f"[agree] batch must be bytes or integers in step {step}: {wrong}") from wrong
        if differ:
            shown = ", ".join(f"rank {rank} {value:016x}" for rank, value in enumerate(values))
            wanted = "every rank must make the same calls in the same order on a pool with the same sizes and seed"
            raise RanksDisagree(f"[agree] {what} differ in step {step}: {shown}; {wanted}", values, step)
        return digest

    def _gather(self, value: int, stream: Any) -> tuple[int, ...]:
        halves = mx.array([value >> 32, value & 0xFFFFFFFF], mx.uint32)
        flat: Any = mx.distributed.all_gather(halves, group=self.group, stream=stream or mx.cpu).tolist()
        return tuple(high << 32 | low for high, low in zip(flat[::2], flat[1::2], strict=True))

    @contextlib.contextmanager
    def _watched(self, call: str, step: int) -> Iterator[None]:
        before = self._waiting
        try:
            self._expect((call, step))
            yield
        except RuntimeError as error:
            if isinstance(error, KVPoolError) or (call == "step" and not str(error).startswith(BACKENDS)):
                raise  # the body itself has failed
            who = f"[{call}] rank {self.rank} of {self.size}"
            raise RankLost(f"{who} lost another one in step {step}: {error}") from error
        finally:
            self._expect(before)

    def _expect(self, waiting: tuple[str, int] | None) -> None:
        with self._wake:
            self._waiting = waiting
            self._wake.notify()

    def _watch_over(self) -> None:
        with self._wake:
            while not self._is_closed:
                waiting = self._waiting
                in_time = self._wake.wait(self.timeout if waiting else None)
                if not in_time and waiting is not None and self._waiting is waiting:
                    who = f"[{waiting[0]}] rank {self.rank} of {self.size}"
                    said = f"{who}: step {waiting[1]} is not over after {self.timeout:g} s, the limit"
                    threading.Thread(target=self._on_timeout, args=[said], daemon=True).start()
                    self._waiting = None


def _hash(batch: Any) -> int:
    if not isinstance(batch, bytes):
        array = np.asarray(batch)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"they are {array.dtype}")
        batch = repr(array.shape).encode() + array.astype(np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(batch, digest_size=8).digest())


def _end_process(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    os._exit(TIMED_OUT)
