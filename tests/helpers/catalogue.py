"""Tests that run on kvpool, on the plain model and on pools with a planted bug; and `idle`, which many tests ask for.

A bug is a `ModelPool` or `ModelPlan` with one mistake, or `broken(name=part)` for anything else.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool.errors import KVPoolError
from kvpool.testing import ModelPlan, ModelPool

#: How a test fails on a bug: an assertion, a refusal that is missing, or one that nobody asked for.
FAILURES = (AssertionError, pytest.fail.Exception, KVPoolError, ValueError, IndexError, RecursionError)


@dataclass(frozen=True)
class Subject:
    """What a test is run against: the parts that replace kvpool's own."""

    name: str
    parts: dict[str, Any] = field(default_factory=dict)
    is_faulty: bool = False


KVPOOL = Subject("kvpool")
MODEL = Subject("model", {"Pool": ModelPool, "Plan": ModelPlan})


def broken(**parts):
    """A planted bug in something besides the pool's logic; its name is that of the first part."""
    (part, *_) = parts.values()
    return Subject(getattr(part, "__name__", type(part).__name__), parts, True)


def _subject(bug):
    if isinstance(bug, Subject):
        return bug
    part = "Plan" if issubclass(bug, ModelPlan) else "Pool"
    return Subject(bug.__name__, MODEL.parts | {part: bug}, True)


def idle(pool):
    """No sequence, no reference, nothing pending: every block is blank or cached."""
    stats = pool.stats()
    pool.check()
    return (
        (stats.used, stats.limbo, stats.sequences, stats.pending, stats.shared) == (0, 0, 0, 0, 0)
        and stats.free == stats.num_blocks - stats.reserved
        and pool.blocks.refcount_histogram().tolist() == [stats.num_blocks - stats.reserved]
    )


class Unchecked(ModelPool):
    """A pool that does not notice by itself what is wrong with it."""

    def check(self):
        """See nothing."""


def planted(*bugs, model=True):
    """Run ``test(Pool, Plan)`` on kvpool and on the sound model; on every planted bug it has to fail."""
    assert bugs, "a test that cannot fail says nothing"
    subjects = [KVPOOL, *([MODEL] if model else []), *map(_subject, bugs)]

    def decorate(test):
        @pytest.mark.parametrize("subject", subjects, ids=lambda subject: subject.name)
        def run(core, subject):
            parts = {"Pool": core.Pool, "Plan": core.Plan} | subject.parts
            if not subject.is_faulty:
                test(**parts)
                return
            with pytest.raises(FAILURES):
                test(**parts)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
