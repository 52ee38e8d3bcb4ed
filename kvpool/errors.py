"""Exceptions of kvpool.

Every message reads ``[call] what is wrong (value), the limit``, and every call that raises one of these
leaves the state of the pool unchanged. Wrong types raise `TypeError`, wrong values `ValueError`, block ids
outside the pool `IndexError`. The classes below are for errors that only a block allocator has.
"""


class KVPoolError(Exception):
    """Base class of every exception that kvpool defines."""


class OutOfBlocks(KVPoolError, MemoryError):
    """The pool cannot supply the blocks that a call needs. Nothing was changed.

    Attributes
    ----------
    needed : int
        Blocks the whole call needs.
    short_by : int
        Blocks missing: ``needed - (blank + evictable)``, plus the watermark for `open`.
    row : int
        Index of the first row of the batch that did not fit, -1 when the call has no rows.
    handle : int
        Handle of that row, -1 when the call has no rows.
    blank, evictable, limbo : int
        Blank blocks, cached blocks that may be evicted, freed blocks that a pending step may still use.
    arena : int
        Arena whose blocks are missing.
    """

    needed = short_by = blank = evictable = limbo = arena = 0
    row = handle = -1

    def __init__(self, message: str, **counts: int) -> None:
        super().__init__(message)
        vars(self).update(counts)


class OutOfSequences(KVPoolError, MemoryError):
    """`open` or `fork` needs more sequence slots than the pool has left. Nothing was changed."""


class _HandleError(KVPoolError, KeyError):
    def __str__(self) -> str:  # KeyError shows repr(message); a sentence should read as one
        return str(self.args[0]) if self.args else ""


class StaleHandle(_HandleError):
    """The handle's sequence was closed: its slot is free or belongs to a newer sequence."""


class ForeignHandle(_HandleError):
    """The handle was issued by another pool, or by none."""


class DoubleFree(KVPoolError, ValueError):
    """A block-level call would drop a reference that the caller does not hold."""


class CapacityExceeded(KVPoolError, ValueError):
    """A batch does not fit the arrays of the plan, or a sequence its block table."""


class PlanStateError(KVPoolError, RuntimeError):
    """A plan is pending where it must not be, is not pending where it must be, or cannot be rolled back."""


class ConcurrentUse(KVPoolError, RuntimeError):
    """A thread called an object while it was inside another call on it.

    A pool makes other threads wait, so only a signal handler in C can be refused by one. A backend's store takes one
    call at a time.
    """


class PoolClosed(KVPoolError, RuntimeError):
    """The pool was shut down."""


class CorruptState(KVPoolError, AssertionError):
    """`check` found an invariant that does not hold. The pool must not be used any further."""


class RequestRejected(KVPoolError, ValueError):
    """A request that could never run, or not now. The scheduler is as it was.

    Attributes
    ----------
    reason : str
        ``"too_long"`` for the model, ``"too_large"`` for the pool or the scheduler, ``"beam"``, ``"queue_full"``,
        ``"deadline"``: it has passed.
    wait : float
        With ``"queue_full"``: how long the requests of the tenant wait now, by the scheduler's clock.
    """

    def __init__(self, message: str, reason: str = "", wait: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.wait = wait


class UnknownRequest(_HandleError):
    """The scheduler has no request with this id: it has finished, or was never added."""


class BackendUnavailable(KVPoolError, ImportError):
    """A backend cannot be loaded; the message says what to install, the cause is chained."""


def install_command(extra: str) -> str:
    """The command that installs what an extra of this kvpool needs: pip finds an installed kvpool by its name.

    Where kvpool is not installed, this is a source tree, and the command names its folder.
    """
    from importlib.metadata import PackageNotFoundError, version  # late: importing kvpool has to be fast
    from pathlib import Path

    try:
        version("kvpool")
        source = "kvpool"
    except PackageNotFoundError:
        source = str(Path(__file__).resolve().parent.parent)
    return f"pip install '{source}[{extra}]'"
