"""The core beside its plain model: every call of a run is made on both, and all that can be read is compared.

`Twin` is a pool for `tests.verify._verify.Run`. The model makes a call first. Then the core returns the same, or raises
the same and is left as it was; afterwards statistics of all arenas, lengths and tables of all rows, the prefix cache's
statistics and events, and the arrays of the plan that was filled are equal.

A pool with a prefix cache may hand out other blocks than the model: there the tables are equal up to the names of
blocks, and other arrays of ids have the same holes. A call on blocks by id then names the model's blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool import Group, Plan, Pool
from kvpool.errors import KVPoolError
from kvpool.testing import ModelPlan, ModelPool
from kvpool.testing.fuzz_target import FuzzFinding as Finding
from tests.verify.wrapped import Wrapped

WORDS_PER_RUN = 200  # few: the model is slow
TAG_SHIFT = 52  # of a handle: a tag, which no live pool shares and which is never 0, stands above
NUMBERS = ("needed", "short_by", "row", "blank", "evictable", "limbo", "arena")  # of an error
FILL = ("step", "reserve", "unshare")  # calls that fill a plan
COMMON = ("positions", "cu_q_lens", "slot_ids")  # arrays that all groups share
OF_GROUPS = ("kv_starts", "copies", "dirty_rows")  # that a group has, whatever the formats
OF_STATES = ("state_src", "state_dst", "state_loads", "state_saves")
BY_ID = ("block_tables", "slot_mapping", "indices", "copies", "state_loads", "state_saves")


def local(value: Any, first: int) -> Any:
    """A result, with handles as a pool has them whose first handle is 0. `first`: the one of this pool."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, local(value.tolist(), first)
    if isinstance(value, list | tuple):
        return [local(one, first) for one in value]
    return value - first if type(value) is int and value >> TAG_SHIFT > 0 else value


def outcome(call: Callable[..., Any], given: Any, options: dict[str, Any]) -> tuple[Any, Exception | None]:
    """What a call returned, or raised."""
    try:
        return call(*given, **options), None
    except Exception as error:  # the other side must raise it, too
        return None, error


def named(error: Exception, first: int) -> tuple[Any, ...]:
    """The kind of an error, its numbers, and its row."""
    numbers = [getattr(error, name, None) for name in NUMBERS]
    return type(error), numbers, local(getattr(error, "handle", -1), first)


class Twin(Wrapped):
    """A pool beside its model, which `make_model` makes."""

    make_model: Callable[..., Any] = ModelPool

    def __init__(self, **options: Any) -> None:
        self.model = type(self).make_model(**options)
        self.plans: dict[Plan, Any] = {}  # those of the model
        groups = options["groups"] or [Group.full()]
        self.kinds = [group.kind for group in groups]
        arenas = {group.arena for group in groups if group.kind != "state"} | {0}
        self.num_arenas = len(arenas) + self.kinds.count("state")
        self.has_cache = self.are_renamed = options["prefix_cache"]
        self.hole = 0 if options["reserved_blocks"] else -1
        self.names: list[dict[int, int]] = [{} for _ in range(self.num_arenas)]  # the core's block -> the model's
        self.taken: list[dict[int, int]] = [{} for _ in range(self.num_arenas)]  # those that `alloc` gave
        self.mine = {"prefix": Pool.prefix.__get__(self), "blocks": Pool.blocks.__get__(self)}  # the core's parts
        self.has_events = options["events"] > 0
        self.cached: tuple[Counter[Any], ...] | None = Counter(), Counter()  # what events told; None: some were lost
        self.untold: list[Any] = []
        self.first, self.first_of_model = 0, self.model._tag << TAG_SHIFT  # handles; the core's: as soon as it is given

    def check(self) -> None:
        """Check both."""
        super().check()
        self.model.check()

    def shutdown(self) -> None:
        """Give both tags back."""
        super().shutdown()
        self.model.shutdown()

    @staticmethod
    def make_plan(pool: Twin, **options: Any) -> Plan:
        """A plan, and the model's."""
        plan = Plan(pool, **options)
        pool.plans[plan] = ModelPlan(pool.model, **options)
        return plan

    def bind(self, plan: Plan) -> None:
        """Bind no array to a plan, so that all rows are dirty."""
        self.both("bind", plan.bind, self.plans[plan].bind, (), {})

    def made(self, name: str, call: Callable[..., Any], given: Any, options: dict[str, Any], part: Any = None) -> Any:
        """Make a call on both. Events that were compared are handed on."""
        if name == "events":
            self.compare()
            told, self.untold = self.untold, []
            return told
        model = self.model.prefix if part == "prefix" else self.model if part is None else self.model.blocks.arena(part)
        return self.both(name, call, getattr(model, name), given, options, part)

    # ---- calls --------------------------------------------------------------------------------------------

    def theirs(self, given: Any, arena: int | None) -> Any:
        """An argument as the model takes it; `arena`: of blocks that it names."""
        if isinstance(given, Plan):
            return self.plans[given]
        if isinstance(given, list | tuple):
            return type(given)(self.theirs(one, arena) for one in given)
        if type(given) is int and given >> TAG_SHIFT > 0:
            return given - self.first + self.first_of_model
        return given if arena is None or not self.are_renamed else self.names[arena].get(given, given)

    def both(self, name: str, mine: Any, model: Any, given: Any, options: dict[str, Any], arena: Any = None) -> Any:
        """Make a call on the model and on the core, and compare everything."""
        if name in ("done", "rollback") and given[0].is_pending:
            self.compare_plan(given[0])  # which nobody has written to
        by_id = arena if name in ("incref", "decref", "mark_cached", "touch") else None
        want, error = outcome(model, self.theirs(given, by_id), options)
        before = None if error is None else (self.fingerprint(), self.digest())
        got, raised = outcome(mine, given, options)
        if error is not None or raised is not None:
            if error is None or raised is None or named(raised, self.first) != named(error, self.first_of_model):
                raise Finding(f"model: {name} gave {raised or got!r}, due was {error or want!r}") from raised
            if isinstance(raised, KVPoolError) and not str(raised).startswith("["):
                raise Finding(f"model: {name} raised a message without its call: {raised}")
            if (self.fingerprint(), self.digest()) != before:
                raise Finding(f"model: {name} changed the pool, and raised: {raised}")
            raise raised
        if name in ("open", "pin") and not self.first:
            self.first = got - (want - self.first_of_model)
        if name == "resize" and self.are_renamed:  # other blocks move, and with them other rows are dirty
            for plan in self.plans:
                self.bind(plan)
        else:
            self.same(name, got, want, self.are_renamed and name in ("alloc", "bundle"))
        if name == "alloc":
            self.taken[arena or 0].update(zip(got.tolist(), want.tolist(), strict=True))
        elif name == "reset":
            self.taken = [{} for _ in range(self.num_arenas)]
        if name in FILL:
            self.compare_plan(given[0])
        if name != "defer_close":  # the next call has to close it
            self.compare()
        return got

    # ---- comparison ---------------------------------------------------------------------------------------

    def same(self, what: str, got: Any, want: Any, only_shape: bool = False) -> None:
        """Two results are equal, but for tags; of those with other ids the holes are."""
        if only_shape:
            got, want = got > self.hole, want > self.hole
        if isinstance(got, np.ndarray) and isinstance(want, np.ndarray):
            are_same = got.dtype == want.dtype and got.shape == want.shape and bool((got == want).all())
        else:
            are_same = got == want and type(got) is type(want)
        got, want = local(got, self.first), local(want, self.first_of_model)
        if not are_same and got != want:
            raise Finding(f"model: {what} is {got}, due {want}")

    def compare(self) -> None:
        """Compare everything that can be read."""
        model = self.model
        for arena in range(self.num_arenas):
            self.same(f"stats of arena {arena}", tuple(self.stats(arena)), tuple(model.stats(arena)))
            if not self.are_renamed:  # the model counts no references of bundles
                blocks = self.mine["blocks"].arena(arena), model.blocks.arena(arena)
                self.same(f"histogram of arena {arena}", *[side.refcount_histogram() for side in blocks])
        if self.has_cache:
            self.same("prefix.stats", tuple(self.mine["prefix"].stats()), tuple(model.prefix.stats()))
        if self.are_renamed:
            for taken, home in zip(self.taken, model.arenas, strict=True):
                for block in [block for block, due in taken.items() if not home.raw.get(due)]:
                    del taken[block]
            self.names = [dict(taken) for taken in self.taken]
        for seq in model.sequences():
            if model._find(seq.handle, True) is not None:
                self.compare_row(seq.handle)
        if self.are_renamed:
            for arena, names in enumerate(self.names):
                if len(set(names.values())) < len(names):
                    raise Finding(f"model: arena {arena} has blocks that are one in the model: {names}")
        if self.has_events:
            self.compare_events()

    def compare_row(self, theirs: int) -> None:
        """Compare what is said of a row."""
        handle = theirs - self.first_of_model + self.first
        who = f"row {theirs & 0xFFFFF}"
        for call in ("is_open", "num_tokens", "capacity"):
            self.same(f"{call} of {who}", getattr(self, call)(handle), getattr(self.model, call)(theirs))
        if self.has_cache and self.model._find(theirs):  # no load
            committed = self.mine["prefix"].committed(handle), self.model.prefix.committed(theirs)
            self.same(f"committed of {who}", *committed)
        for g in range(len(self.kinds)):
            self.same(f"kv_len of {who} in group {g}", self.kv_len(handle, g), self.model.kv_len(theirs, g))
            got, want = self.table(handle, g), self.model.table(theirs, g)
            self.same(f"table of {who} in group {g}", got, want, self.are_renamed and self.kinds[g] != "state")
            if self.are_renamed and self.kinds[g] != "state":
                names = self.names[self.model.layers[g].arena.number]
                for block, due in zip(got.ravel().tolist(), want.ravel().tolist(), strict=True):
                    if block > self.hole and names.setdefault(block, due) != due:
                        raise Finding(f"model: {who} shares block {block} in group {g}, in the model it does not")

    def compare_events(self) -> None:
        """Compare what the cache told, in any order within a call."""
        mine, due = self.mine["prefix"].events(), self.model.prefix.events()
        self.untold += mine
        lost = ["lost" in [name for name, *_ in told] for told in (mine, due)]
        if lost[0] != lost[1]:
            raise Finding(f"model: events are {mine}, due {due}")
        if lost[0]:
            self.cached = None
        if self.cached is not None:
            for cached, told in zip(self.cached, (mine, due), strict=True):
                for name, *rest in told:
                    if name != "cleared":
                        cached[rest[0], rest[5] if name == "stored" else rest[1]] += 1 if name == "stored" else -1
            if +self.cached[0] != +self.cached[1] or any(set(cached.values()) - {0, 1} for cached in self.cached):
                raise Finding(f"model: events are {mine}, due {due}")

    def compare_plan(self, plan: Plan) -> None:
        """Compare every array of a plan, as long as it is pending."""
        due = self.plans[plan]
        for name in ("num_tokens", "is_pending", "step_id", "handles", "served"):
            self.same(f"plan.{name}", getattr(plan, name), getattr(due, name))
        of_groups = [name for name in due.names if name not in COMMON]
        for name in due.names if len(self.kinds) == 1 else set(due.names) & set(COMMON):
            if self.kinds != ["state"] or name in (*COMMON, "seq_lens"):
                self.same_ids(f"plan.{name}", getattr(plan, name), getattr(due, name))
        for g, kind in enumerate(self.kinds):
            names = [*OF_GROUPS, *("kv_lens" if name == "seq_lens" else name for name in of_groups)]
            if kind == "state":
                names = [*OF_STATES, *(["kv_lens"] if "seq_lens" in of_groups else [])]
            for name in names:
                got, want = getattr(plan.groups[g], name), getattr(due.groups[g], name)
                self.same_ids(f"plan.groups[{g}].{name}", got, want)

    def same_ids(self, what: str, got: Any, want: Any) -> None:
        """Two arrays of plans are equal."""
        self.same(what, got, want, self.are_renamed and what.endswith(BY_ID))
