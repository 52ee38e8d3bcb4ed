"""The catalogue of regressions: one test body, run against kvpool, against the plain model, and against planted bugs.

    @row(FreesEachOccurrence)
    def test_a1_block_twice_in_one_free(make_pool): ...

names the row A1 of regressions/README.md and a bug of the kind that bit there, planted again. The body must pass on
kvpool and on the sound model, and must fail on every planted bug. A bug is a `ModelPool` or `ModelPlan` with one
mistake, or `broken(name=part)` for anything else that a test takes from the fixture `parts`.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.errors import KVPoolError
from kvpool.testing import ModelPlan, ModelPool, conformance, conformance_attention
from kvpool.testing.model_blocks import ModelBlocks, public_call

#: What finds a bug: an assertion, a refusal that is missing, or one that nobody asked for. Else the test is broken.
CONVICTIONS = (AssertionError, pytest.fail.Exception, KVPoolError, ValueError, IndexError, RecursionError)


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


def row(*bugs, model=True):
    """Run a test against kvpool, the sound model (unless it can tell nothing there) and each planted bug."""
    assert bugs, "a test of the catalogue has a planted bug"
    subjects = [KVPOOL, *([MODEL] if model else []), *map(_subject, bugs)]
    return pytest.mark.parametrize("subject", subjects, indirect=True, ids=lambda subject: subject.name)


def parts_of(subject, defaults):
    """kvpool's own parts, with those of the subject in their place."""
    return SimpleNamespace(**(defaults | subject.parts))


def conforms(factory, name):
    """Run one case of the conformance kit."""
    cases = {case.__name__: case for case in [*conformance.CASES, *conformance_attention.FEATURE_CASES]}
    assert conformance.check_backend(factory, [cases[name]]) == {name: "passed"}


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
    """Run ``test(Pool, Plan)`` on kvpool and on the sound model; on every planted bug it has to fail.

    Like `row`, for tests that are no rows of tests/regressions/README.md.
    """
    assert bugs, "a test that cannot fail says nothing"
    subjects = [KVPOOL, *([MODEL] if model else []), *map(_subject, bugs)]

    def decorate(test):
        @pytest.mark.parametrize("subject", subjects, ids=lambda subject: subject.name)
        def run(core, subject):
            parts = {"Pool": core.Pool, "Plan": core.Plan} | subject.parts
            if not subject.is_faulty:
                test(**parts)
                return
            with pytest.raises(CONVICTIONS):
                test(**parts)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


# ---- bugs of several families


class CachedIsNotTouched(Unchecked):
    """A hit is found, but stays where it may be evicted."""

    class blocks_class(ModelBlocks):
        def touch(self, ids):
            unused = list(self._arena.unused)
            super().touch(ids)
            self._arena.unused = unused

    def _share(self, table, entry):
        super()._share(table, entry)
        entry.is_idle = lambda: True


class ClosesTwice(Unchecked):
    """A dead handle closes whoever has its slot now, or nobody."""

    @public_call
    def close(self, handles):
        for handle in np.atleast_1d(handles).tolist():
            seq = self._sequences.get(handle & 0xFFFFF)
            if seq is not None:
                self._close(seq)


class CountIsClamped(Unchecked):
    """A count stops at zero, and nobody is told."""

    class blocks_class(ModelBlocks):
        @public_call
        def decref(self, ids):
            self._arena.drop_raw([block for block in np.atleast_1d(ids).tolist() if self._arena.raw.get(block)])


class CutMovesTheLengthOnly(Unchecked):
    """The length moves, whatever it is and whoever writes there; the table stays."""

    @public_call
    def truncate(self, handles, lens):
        for seq in self.batch("truncate", handles):
            seq.num_tokens = lens


class PaddingKeepsTheOldRow(ModelPlan):
    """Rows beyond the batch are not written."""

    def fill(self, batch, new, served, step, shape):
        super().fill(batch, new, served, step, shape and (len(batch), shape[1]))
        for part in [self, *self.groups] if shape else []:
            part._size = shape[0], *part._size[1:]


class TakesBeforeItLooks(Unchecked):
    """Blocks are taken row by row until one fails; those taken have no owner."""

    def _judge(self, *arguments):
        try:
            return super()._judge(*arguments)
        except MemoryError:
            self.arenas[0].blank.pop()
            raise
