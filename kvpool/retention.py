"""What is to stay in the prefix cache for a while; docs/prefix.md#retention is the contract."""

from dataclasses import dataclass
from operator import index

MOST_PRIORITY = 7
MOST_TIME = 2**62 - 1


@dataclass(frozen=True, slots=True)
class Keep:
    """A wish that a prefix stays cached: while others may leave, it does not.

    Parameters
    ----------
    priority : int
        1 .. 7. What has no directive has 0, and leaves first; then the lowest priority.
    ttl : int
        How long, 1 .. 2^62 - 1, in the unit of the clock that `PrefixCache.tick` is told.
    tokens : int, optional
        Only for so many tokens from the first on, 1 .. 2^62 - 1, rounded down to base blocks; default: for all.

    Raises
    ------
    TypeError, ValueError
        An argument is not an integer, or out of range.

    Examples
    --------
    >>> from kvpool.retention import Keep
    >>> Keep(priority=4, ttl=300)
    Keep(priority=4, ttl=300, tokens=None)
    """

    priority: int
    ttl: int
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, high in (("priority", MOST_PRIORITY), ("ttl", MOST_TIME), ("tokens", MOST_TIME)):
            value = getattr(self, name)
            if value is None and name == "tokens":
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"[Keep] {name} must be an int, not {type(value).__name__} ({value!r})")
            if not 1 <= index(value) <= high:
                raise ValueError(f"[Keep] {name} is out of range ({value}), it must be in 1 .. {high}")
            object.__setattr__(self, name, index(value))
