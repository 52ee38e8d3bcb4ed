"""A pool beside a storage of stamps: every read is checked, in the scripts that this fuzzer prints.

`Watched` has the calls of `kvpool.Pool`. It plays the backend (a plan runs, at the latest, when it is declared done),
writes a new stamp for every token, and after each call reads every open sequence.

Examples
--------
>>> import kvpool
>>> from proof.fuzz.watched import Watched
>>> pool = Watched(kvpool.Pool(8, 2))
>>> plan = pool.plan(max_rows=2, max_tokens=8)
>>> parent = pool.open(0, b"")
>>> pool.step(plan, [parent], [3])
>>> [child] = pool.fork(parent, 1).tolist()
>>> pool.done(plan)
>>> pool.step(plan, [parent, child], [1, 1])
>>> pool.done(plan)
>>> pool.close([parent, child])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpool import Plan, Pool
from kvpool.errors import KVPoolError
from proof.fuzz import misuse
from proof.fuzz._calls import blank_blocks
from proof.fuzz.ranks import ranks_agree

POISON = -1
PASSED_ON = ("num_tokens", "capacity", "table", "can", "is_open", "stats", "kv_len")
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens")


@dataclass
class _Sequence:
    stamps: list[int]  # what each place has to read
    namespace: bytes = b""
    tokens: list[int] = field(default_factory=list)  # as far as they were committed
    evicted: int = 0

    def copy(self) -> _Sequence:
        return _Sequence(list(self.stamps), self.namespace, list(self.tokens), self.evicted)


@dataclass
class _Step:
    """What a backend has to do for a plan, and what its reads must find."""

    plan: Any
    copies: list[list[int]]
    writes: list[tuple[int, int]]  # (slot, stamp)
    reads: list[tuple[list[int], list[int]]]  # (table, stamps) per row
    before: dict[int, tuple[int, list[int]]]  # handle -> length and table before the step
    executed: bool = False
    noted: bool = False


class _Part:
    """`Pool.prefix` or `Pool.blocks`, watched. Calls outside `own` change nothing that a sequence could see."""

    def __init__(self, watched: Watched, part: Any, **own: Callable[..., Any]) -> None:
        self._watched, self._part, self._own = watched, part, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else self._watched._checked(getattr(self._part, name))


class Watched:
    """See the module."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.own_prefix: Any = pool.prefix
        self.prefix = _Part(self, self.own_prefix, pin=self._pin, commit=self._commit) if self.own_prefix else None
        one_more = {name: partial(self._reference, getattr(pool.blocks, name)) for name in ("incref", "touch")}
        one_less = {name: partial(self._release, getattr(pool.blocks, name)) for name in ("decref", "free")}
        self.blocks = _Part(self, pool.blocks, alloc=self._alloc, **one_more, **one_less)
        self.block_size: int = pool.block_size
        slots = pool.num_blocks * self.block_size
        self.real = [POISON] * slots  # as far as the backend has come
        self.virtual = [POISON] * slots  # as if every pending plan had run
        self.sequences: dict[int, _Sequence] = {}
        self.dead: list[int] = []
        self.loads: dict[int, tuple[int, list[int]]] = {}  # sequence -> its hits and blocks, while it is loaded
        self.raw: dict[int, list[int]] = {}  # block -> what it has to hold
        self.references: dict[int, int] = {}  # block -> raw references
        self.plans: list[Any] = []
        self.mirrors: dict[int, dict[int, list[int]]] = {}
        self.pending: list[_Step] = []
        self.known: dict[tuple[bytes, tuple[int, ...]], set[tuple[int, ...]]] = {}
        self.next_stamp = 0

    # ---- storage ------------------------------------------------------------------------------------------

    def _stamp(self) -> int:
        self.next_stamp += 1
        return self.next_stamp

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _read(self, store: list[int], table: list[int], length: int) -> list[int]:
        return [store[s] for block in table for s in self._slots(block)][:length]

    def _poison(self, blocks: list[int]) -> None:
        for block in blocks:
            for slot in self._slots(block):
                self.real[slot] = self.virtual[slot] = POISON

    def _run(self, store: list[int], step: _Step) -> None:
        """Copies, then writes."""
        for src, dst, n in step.copies:
            for k in range(n):
                store[dst * self.block_size + k] = store[src * self.block_size + k]
        for slot, stamp in step.writes:
            store[slot] = stamp

    def _run_until(self, plan: Any) -> None:
        """The backend works in step order."""
        for step in self.pending:
            if not step.executed:
                self._execute(step)
            if step.plan is plan:
                return

    def _execute(self, step: _Step) -> None:
        self._run(self.real, step)
        step.executed = True
        for table, stamps in step.reads:
            found = self._read(self.real, table, len(stamps))
            assert found == stamps, f"a row with table {table} reads {found}, it wrote {stamps}"

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """A refused call leaves the fingerprint as it was."""
        before = self.pool.fingerprint()
        try:
            return call()
        except (KVPoolError, ValueError, TypeError, IndexError):
            assert self.pool.fingerprint() == before, "a refused call changed the state"
            raise

    def free_blocks(self) -> list[int]:
        """Poison blocks that nobody refers to and no cache keeps, so that a later read of one is found."""
        return blank_blocks(self.pool) if isinstance(self.pool, Pool) else []

    def _check(self) -> None:
        """Check that every read is right, and that the pool finds no fault in itself."""
        self.pool.check()
        self._poison(self.free_blocks())
        stores = [self.virtual] if self.pending else [self.virtual, self.real]
        for handle, sequence in self.sequences.items():
            table = self.pool.table(handle).tolist()
            length = len(sequence.stamps) + sequence.evicted
            assert self.pool.num_tokens(handle) == length, f"{handle} has another length"
            for store in stores:
                found = self._read(store, table, len(sequence.stamps))
                assert found == sequence.stamps, f"{handle} with table {table} reads {found}, not {sequence.stamps}"
        for block, content in self.raw.items():
            for store in stores:
                assert [store[s] for s in self._slots(block)] == content, f"block {block} was overwritten"

    # ---- sequences ----------------------------------------------------------------------------------------

    def plan(self, max_rows: int, max_tokens: int, formats: tuple[str, ...] = FORMATS, **options: Any) -> Any:
        """A plan of this pool."""
        made = Plan(self.pool, max_rows, max_tokens, formats=formats, **options)
        self.plans.append(made)
        self.mirrors[id(made)] = {}
        return made

    def _opened(self, handle: int, tokens: Any, namespace: bytes) -> int:
        assert handle not in self.sequences and handle not in self.dead, f"handle {handle} was used before"
        length = self.pool.num_tokens(handle)
        table = self.pool.table(handle).tolist()
        cached = length // self.block_size
        self._poison(table[cached:])
        stamps = self._read(self.virtual, table, length)
        known = list(tokens)[:length] if length else []
        for k in range(cached):
            end = (k + 1) * self.block_size
            content = tuple(stamps[end - self.block_size : end])
            assert content in self.known.get((namespace, tuple(known[:end])), ()), (
                f"block {table[k]} is a hit for tokens {known[:end]}, it holds other ones"
            )
        self.sequences[handle] = _Sequence(stamps, namespace, known)
        self._check()
        return handle

    def open(self, tokens: Any = 0, namespace: bytes = b"", load: bool = False) -> int:
        """`Pool.open`; what is found in the cache must be what these tokens wrote."""
        handle = self._attempt(lambda: self.pool.open(tokens, namespace, load=load))
        self._opened(handle, tokens, namespace)
        if load:
            self.loads[handle] = self.pool.num_tokens(handle), self.pool.table(handle).tolist()
        return int(handle)

    def loaded(self, handle: int, n: int) -> bool:
        """`Pool.loaded`; the loader has written all blocks by then, also those of a sequence that was closed."""
        length, table = self.loads[handle]
        stamps = [self._stamp() for _ in range(length, len(table) * self.block_size)]
        for place, stamp in enumerate(stamps, length):
            block, at = table[place // self.block_size], place % self.block_size
            self.real[block * self.block_size + at] = self.virtual[block * self.block_size + at] = stamp
            if block in self.raw:
                self.raw[block][at] = stamp
        is_open = self._attempt(lambda: self.pool.loaded(handle, n))
        del self.loads[handle]
        if is_open and self.pool.num_tokens(handle) == 0:  # flushed meanwhile: the bytes may be of other weights
            self.sequences[handle].stamps.clear()
        elif is_open and n:
            self.sequences[handle].stamps += stamps[: n - length]
        self._check()
        return bool(is_open)

    def _pin(self, tokens: Any, namespace: bytes = b"") -> int:
        """`Pool.prefix.pin`."""
        return self._opened(self._attempt(lambda: self.own_prefix.pin(tokens, namespace)), tokens, namespace)

    def fork(self, handle: int, n: int = 1) -> Any:
        """`Pool.fork`."""
        children = self._attempt(lambda: self.pool.fork(handle, n))
        for child in children.tolist():
            assert child not in self.sequences and child not in self.dead, f"handle {child} was used before"
            self.sequences[child] = self.sequences[handle].copy()
        self._check()
        return children

    def truncate(self, handle: int, length: int) -> None:
        """`Pool.truncate` of one sequence."""
        left = length - self.sequences[handle].evicted
        keep = self.pool.table(handle).tolist()[: -(-left // self.block_size)]
        self._attempt(lambda: self.pool.truncate(handle, length))
        assert self.pool.table(handle).tolist() == keep, "truncate kept other blocks than the first"
        del self.sequences[handle].stamps[left:], self.sequences[handle].tokens[left:]
        self._check()

    def compact(self, handle: int, length: int, first: int = 0) -> None:
        """`Pool.compact` of one sequence; of the tokens behind `first` the newest stay."""
        sequence, table = self.sequences[handle], self.pool.table(handle).tolist()
        self._attempt(lambda: self.pool.compact(handle, length, first))
        n, still = len(sequence.stamps), min(first, length)
        keep = [*range(still), *range(n - length + still, n)]
        for store in (self.real, self.virtual):
            found = self._read(store, table, n)
            for place, k in enumerate(keep):
                store[table[place // self.block_size] * self.block_size + place % self.block_size] = found[k]
        self._evicted(sequence, keep)

    def evict_blocks(self, handle: int, indices: list[int]) -> None:
        """`Pool.evict_blocks`."""
        sequence, table = self.sequences[handle], self.pool.table(handle).tolist()
        self._attempt(lambda: self.pool.evict_blocks(handle, indices))
        stay = [block for k, block in enumerate(table) if k not in indices]
        assert self.pool.table(handle).tolist() == stay, "evict_blocks kept other blocks"
        self._evicted(sequence, [k for k in range(len(sequence.stamps)) if k // self.block_size not in indices])

    def _evicted(self, sequence: _Sequence, keep: list[int]) -> None:
        if len(keep) < len(sequence.stamps):
            sequence.evicted += len(sequence.stamps) - len(keep)
            sequence.stamps = [sequence.stamps[k] for k in keep]
            sequence.tokens = []
        self._check()

    def close(self, handles: Any) -> None:
        """`Pool.close`."""
        self._attempt(lambda: self.pool.close(handles))
        self._closed(handles)

    def close_finished(self, handles: list[int], mask: Any) -> int:
        """`Pool.close_finished`, all rows finished."""
        n = self._attempt(lambda: self.pool.close_finished(handles, mask))
        self._closed(handles)
        return int(n)

    def defer_close(self, handle: int) -> None:
        """`Pool.defer_close`, also of a handle that is dead; the check behind it is the next call."""
        self.pool.defer_close(handle)
        self._closed([handle] if handle in self.sequences else [])

    def _closed(self, handles: Any) -> None:
        for handle in handles if isinstance(handles, list) else [handles]:
            del self.sequences[handle]
            self.dead.append(handle)
        self._check()

    def _commit(self, handles: Any, tokens: list[int], counts: list[int] | None = None) -> None:
        """`Pool.prefix.commit`: from now on the blocks of these sequences may be hits for these tokens."""
        self._attempt(lambda: self.own_prefix.commit(handles, tokens, counts))
        rows, left = (handles if isinstance(handles, list) else [handles]), list(tokens)
        for handle, n in zip(rows, counts or [len(tokens)], strict=True):
            self._told(self.sequences[handle], left[:n])
            del left[:n]
        self._check()

    def _told(self, sequence: _Sequence, tokens: list[int]) -> None:
        before, size = len(sequence.tokens), self.block_size
        sequence.tokens += tokens
        for end in range((before // size + 1) * size, len(sequence.tokens) + 1, size):
            key = (sequence.namespace, tuple(sequence.tokens[:end]))
            self.known.setdefault(key, set()).add(tuple(sequence.stamps[end - size : end]))

    # ---- steps --------------------------------------------------------------------------------------------

    def step(self, plan: Any, handles: list[int], counts: list[int], **options: Any) -> None:
        """`Pool.step`."""
        before = {h: (len(self.sequences[h].stamps), self.pool.table(h).tolist()) for h in handles}
        self._attempt(lambda: self.pool.step(plan, handles, counts, **options))
        served = [n * int(s) for n, s in zip(counts, plan.served, strict=True)]
        self._stepped(plan, handles, served, before, served)

    def reserve(self, plan: Any, handles: list[int], counts: list[int]) -> None:
        """`Pool.reserve`."""
        before = {h: (len(self.sequences[h].stamps), self.pool.table(h).tolist()) for h in handles}
        self._attempt(lambda: self.pool.reserve(plan, handles, counts))
        self._stepped(plan, handles, [0] * len(handles), before, counts)

    def unshare(self, plan: Any, handles: list[int], lens: list[int], first: int = 0) -> None:
        """`Pool.unshare`: copies like those of a step, and lengths stay."""
        before = {h: (len(self.sequences[h].stamps), self.pool.table(h).tolist()) for h in handles}
        self._attempt(lambda: self.pool.unshare(plan, handles, lens, first))
        self._stepped(plan, handles, [0] * len(handles), before, [0] * len(handles))

    def _stepped(self, plan: Any, handles: list[int], new: list[int], before: dict[int, Any], room: list[int]) -> None:
        size, writes, reads, fresh = self.block_size, [], [], []
        for handle, n, more in zip(handles, new, room, strict=True):
            table = self.pool.table(handle).tolist()
            length, old = before[handle]
            due = max(len(old), -(-(length + more) // size) if more else 0)
            assert len(table) == due, f"{handle} has {len(table)} blocks, {due} are due"
            fresh += [b for k, b in enumerate(table) if k >= len(old) or old[k] != b]
            stamps = self.sequences[handle].stamps
            for _ in range(n):
                writes.append((table[len(stamps) // size] * size + len(stamps) % size, self._stamp()))
                stamps.append(writes[-1][1])
        assert plan.slot_mapping[: len(writes)].tolist() == [slot for slot, _ in writes], "slot_mapping is wrong"
        mirror = self.mirrors[id(plan)]
        for row in plan.dirty_rows.tolist():
            mirror[row] = plan.block_tables[row].tolist()
        for row, handle in enumerate(handles):
            table = self.pool.table(handle).tolist()
            assert mirror.get(row, [])[: len(table)] == table, f"row {row} of block_tables is not its table"
            reads.append((table, list(self.sequences[handle].stamps)))
        self._poison(fresh)
        step = _Step(plan, plan.copies.tolist(), writes, reads, before)
        self._run(self.virtual, step)
        if self.pool.options.in_order:
            self._execute(step)
        else:
            self.pending.append(step)
        self._check()

    def execute(self, plan: Any) -> None:
        """The backend runs everything up to this plan, and the pool does not know."""
        self._run_until(plan)

    def done(self, plan: Any) -> None:
        """`Pool.done`; the backend has run the plan, and all before it."""
        self._run_until(plan)
        self._attempt(lambda: self.pool.done(plan))
        for step in self.pending:
            step.noted |= step.plan is plan
        while self.pending and self.pending[0].noted:
            self.pending.pop(0)
        self._check()

    def rollback(self, plan: Any) -> None:
        """`Pool.rollback`: lengths and tables are as before the step."""
        self._attempt(lambda: self.pool.rollback(plan))
        step = self.pending.pop()
        for handle, (length, table) in step.before.items():
            if handle in self.sequences:
                assert self.pool.table(handle).tolist() == table, "rollback left another table"
                del self.sequences[handle].stamps[length:]
        if not step.executed:
            self.virtual = list(self.real)
            for other in self.pending:
                if not other.executed:
                    self._run(self.virtual, other)
            copied = [d * self.block_size + k for _, d, n in step.copies for k in range(n)]
            for slot in [slot for slot, _ in step.writes] + copied:
                if slot // self.block_size in self.raw:
                    self.raw[slot // self.block_size][slot % self.block_size] = self.virtual[slot]
        self._check()

    # ---- blocks -------------------------------------------------------------------------------------------

    def _alloc(self, n: int) -> list[int]:
        """`Pool.blocks.alloc`; the caller writes into his blocks at once."""
        blocks: list[int] = self._attempt(lambda: self.pool.blocks.alloc(n)).tolist()
        for block in blocks:
            self.references[block] = 1
            self.raw[block] = [self._stamp() for _ in range(self.block_size)]
            for slot, stamp in zip(self._slots(block), self.raw[block], strict=True):
                self.real[slot] = self.virtual[slot] = stamp
        self._check()
        return blocks

    def _reference(self, call: Callable[..., Any], block: int) -> None:
        """`incref` or `touch`: what the block holds now stays."""
        self._attempt(lambda: call(block))
        self.references[block] = self.references.get(block, 0) + 1
        self.raw.setdefault(block, [self.virtual[s] for s in self._slots(block)])
        self._check()

    def _release(self, call: Callable[..., Any], block: int) -> None:
        """`decref` or `free`."""
        self._attempt(lambda: call(block))
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block], self.raw[block]
        self._check()

    # ---- the rest -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """`Pool.reset`."""
        self.pool.reset()
        self.dead += self.sequences
        for kept in (self.sequences, self.raw, self.references, self.pending, self.loads):
            kept.clear()
        self._check()

    def misuse(self, name: str, b: int, c: int) -> None:
        """A call of `proof.fuzz.misuse`: refused by what is documented, and nothing changed."""
        queue = [step.plan for step in self.pending]
        idle = [plan for plan in self.plans if plan not in queue]
        stale = [handle for handle in self.dead if not self.pool.is_open(handle)]
        loading = [handle for handle in self.loads if handle in self.sequences]
        live = [handle for handle in self.sequences if handle not in self.loads][:4]
        refs = self.pool.blocks.refcount
        facts = misuse.Facts(self.pool, live, stale[:8], queue, idle, b, c, refs, self._table, loading)
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

    def __getattr__(self, name: str) -> Any:
        """The calls that change nothing a sequence could see."""
        if name not in PASSED_ON:
            raise AttributeError(name)
        return self._checked(getattr(self.pool, name))

    def _checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            result = self._attempt(lambda: call(*args))
            self._check()
            return result

        return checked
