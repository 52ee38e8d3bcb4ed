"""`kvpool.testing.watch` for scripts of this fuzzer: free blocks are overwritten, and the calls that only it makes."""

from __future__ import annotations

from kvpool import Pool
from kvpool.testing import watch
from proof.fuzz import misuse
from proof.fuzz._calls import blank_blocks
from proof.fuzz.ranks import ranks_agree


class Watched(watch.Watched):
    """See the module."""

    def free_blocks(self) -> list[int]:
        """What nobody refers to and no cache keeps may be overwritten at once."""
        return blank_blocks(self.pool) if isinstance(self.pool, Pool) else []

    def misuse(self, name: str, b: int, c: int) -> None:
        """A call of `proof.fuzz.misuse`: refused by what is documented, and nothing changed."""
        queue = [step.plan for step in self.pending]
        idle = [plan for plan in self.plans if plan not in queue]
        stale = [handle for handle in self.dead if not self.pool.is_open(handle)]
        live = list(self.sequences)[:4]
        facts = misuse.Facts(self.pool, live, stale[:8], queue, idle, b, c, self.pool.blocks.refcount, self._table)
        error, attempt = getattr(misuse, name)(facts)
        if error is None:
            return
        try:
            self._attempt(attempt)
        except error:
            return
        raise AssertionError(f"misuse was accepted: {name}")

    def _table(self, handle: int) -> list[int]:
        return list(self.pool.table(handle).tolist())

    def ranks(self, a: int, b: int) -> None:
        """Two more pools that are told different things; see `proof.fuzz.ranks`."""
        options = self.pool.options._replace(prefix_cache=True, seed=1, events=0)._asdict()
        said = ranks_agree(type(self.pool), options, a, b)
        assert said is None, said
