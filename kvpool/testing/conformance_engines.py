"""Random engines on a real pool, compared with dense attention after every step, and the cases about layer groups.

`RandomEngine` drives a backend in a pool of one group, `GroupEngine` one below `kvpool.group_storage` in a pool of
several. `kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.group_storage import GroupStorage
from kvpool.protocol import AttentionOptions, BatchShape, KVBackend, StepArrays
from kvpool.sizing import StateArray
from kvpool.spec import KVSpec
from kvpool.testing.filled import (
    SEED,
    Factory,
    attend,
    capabilities_of,
    case,
    close,
    dense_rows,
    everything,
    fill,
    fill_all,
    int32,
    need,
    refused,
    same_bytes,
    specs,
    token_columns,
    values,
    write,
)

VOCABULARY = 211
_MAX_TOKENS = 48
_Q_HEADS = 4


class Engine:
    """Draws what an engine does to a pool, turn by turn; who inherits makes and checks the steps.

    A token is an integer; its keys and values in each layer come from a fixed table. So a sequence's history, a list of
    tokens, says what the pool must hold for it.
    """

    turns: tuple[str, ...]  #: what is done, as often as it stands there
    most_open: int
    most_rows: int

    def __init__(self, pool: Pool, formats: Sequence[str], max_tokens: int, specs: Iterable[KVSpec], seed: int) -> None:
        self.pool, self.seed, self.rng = pool, seed, np.random.default_rng(seed)
        self.plan = Plan(pool, self.most_rows, max_tokens, formats=tuple(formats))
        self.tokens = [
            [values(self.rng, (VOCABULARY, spec.num_kv_heads, dim), spec.dtype) for _, dim in spec.planes]
            for spec in specs
        ]
        self.history: dict[int, list[int]] = {}
        self.num_steps = 0

    def play(self, turns: Iterable[int]) -> None:
        """Play and check these turns, then close everything: no block may be missing.

        Each draws from numbers of its own: others can be left out, and it stays what it is.
        """
        for turn in turns:
            self.rng = np.random.default_rng([self.seed, turn])
            self._turn(list(self.history))
        self.pool.close(list(self.history))
        stats = self.pool.stats()
        assert stats.blank == stats.num_blocks - stats.reserved, f"blocks leaked: {stats} (seed {self.seed})"
        self.pool.check()
        self.pool.shutdown()

    def _turn(self, live: list[int]) -> None:
        what = self.rng.choice(self.turns)
        if not live or (what == "open" and len(live) < self.most_open):
            self.history[self.pool.open()] = []
        elif what == "step" or (what in ("open", "fork") and len(live) == self.most_open):
            handles = [int(h) for h in self.rng.permutation(live)[: self.rng.integers(1, self.most_rows + 1)]]
            if not self.step(handles, self.rng.integers(0, 9, len(handles)).tolist()):
                self.close(max(live, key=lambda handle: len(self.history[handle])))
        else:
            getattr(self, what)(live[self.rng.integers(len(live))])

    def step(self, handles: list[int], counts: list[int]) -> bool:
        """Give each row so many new tokens. Returns False if there are too few blocks."""
        raise NotImplementedError

    def fork(self, handle: int) -> int:
        """A child with the same history."""
        child = int(self.pool.fork(handle)[0])
        self.history[child] = list(self.history[handle])
        return child

    def close(self, handle: int) -> None:
        """Close a sequence."""
        self.pool.close(handle)
        del self.history[handle]


class _BackendFailed(Exception):
    """The planted failure."""


class RandomEngine(Engine):
    """An engine on one backend, every answer of which is checked.

    Before each step every slot that no sequence may read is set to NaN. With `fail_every`, every that many-th step is
    broken off in its last layer, half written. What raises `failure`, a step or a reservation, is rolled back and done
    again, once.
    """

    turns = ("step",) * 11 + ("fork",) * 3 + ("truncate", "close", "open") * 2
    most_open, most_rows = 8, 6

    def __init__(
        self,
        factory: Factory,
        spec: KVSpec,
        seed: int,
        fail_every: int = 0,
        failure: type[BaseException] = _BackendFailed,
        num_blocks: int | None = None,
    ) -> None:
        self.spec, self.fail_every, self.failure = spec, fail_every, failure
        num_blocks = num_blocks or 2 + max(6, 64 // spec.block_size)
        self.backend: KVBackend = factory(spec, num_blocks)
        pool = Pool(num_blocks, spec.block_size, max_seqs=12)
        super().__init__(pool, self.backend.required_formats, _MAX_TOKENS, [spec] * spec.num_layers, seed)

    def truncate(self, handle: int) -> None:
        """Shorten a sequence."""
        length = int(self.rng.integers(len(self.history[handle]) + 1))
        self.pool.truncate(handle, length)
        del self.history[handle][length:]

    def step(self, handles: list[int], counts: list[int]) -> bool:
        """Give each row so many new tokens. Returns False if there are too few blocks."""
        tokens = [self.rng.integers(VOCABULARY, size=n).tolist() for n in counts]
        pad_to = (self.most_rows, _MAX_TOKENS) if self.rng.random() < 0.3 else None
        try:
            if self.rng.random() < 0.2:  # a reservation's copies are work of their own
                self._reserve(handles, counts)
            self._poison()
            self.pool.step(self.plan, handles, counts, pad_to=pad_to)
        except (OutOfBlocks, CapacityExceeded):  # a sequence may outgrow the pool
            return False
        self.num_steps += 1
        fail = self.fail_every > 0 and self.num_steps % self.fail_every == 0
        try:
            self._execute(handles, tokens, fail)
        except self.failure:
            self._roll_back()
            self.pool.step(self.plan, handles, counts, pad_to=pad_to)
            self._execute(handles, tokens)
        self.pool.done(self.plan)
        for handle, new in zip(handles, tokens, strict=True):
            self.history[handle] += new
        return True

    def _reserve(self, handles: list[int], counts: list[int]) -> None:
        self.pool.reserve(self.plan, handles, counts)
        try:
            self.backend.copy_blocks(self.plan)
        except self.failure:
            self._roll_back()
            self.pool.reserve(self.plan, handles, counts)
            self.backend.copy_blocks(self.plan)
        self.pool.done(self.plan)

    def _roll_back(self) -> None:
        """Take the step back; every sequence has the length that it had."""
        self.pool.rollback(self.plan)
        self.pool.check()
        for handle, history in self.history.items():
            length = self.pool.num_tokens(handle)
            assert length == len(history), f"{length} tokens after a rollback, not {len(history)} (seed {self.seed})"

    def _execute(self, handles: list[int], tokens: list[list[int]], fail: bool = False) -> None:
        """One forward: copies, then per layer writes and reads."""
        backend, plan = self.backend, self.plan
        new = np.zeros(len(plan.slot_mapping), np.int64)
        flat = [token for row in tokens for token in row]
        new[: len(flat)] = flat
        step = reads = backend.prepare(plan)
        if not backend.capabilities.reads_see_writes:  # visible to the next plan: read by another one
            tables, lens = plan.block_tables.copy(), plan.seq_lens.copy()
            reads = backend.prepare(StepArrays(tables, lens, plan.cu_q_lens.copy(), plan.slot_mapping.copy()))

        backend.copy_blocks(plan)
        for layer in range(self.spec.num_layers):
            k, v = (backend.asarray(x[new]) for x in self.tokens[layer])
            if fail and layer == self.spec.num_layers - 1:
                half = plan.slot_mapping.copy()
                half[::2] = -1
                backend.write(backend.prepare(StepArrays(slot_mapping=half)), layer, k, v)
                raise self.failure
            backend.write(step, layer, k, v)
            q = values(self.rng, (new.size, _Q_HEADS, self.spec.head_dim), self.spec.dtype)
            out = backend.to_numpy(backend.attend(reads, layer, backend.asarray(q)))
            contexts = [self.history[handle] + row for handle, row in zip(handles, tokens, strict=True)]
            rows = [(len(row), *(x[of] for x in self.tokens[layer])) for row, of in zip(tokens, contexts, strict=True)]
            what = f"engine step {self.num_steps}, layer {layer}, engine seed {self.seed}"
            close(out, dense_rows(q, self.spec.value_head_dim, rows), self.spec, what)

    def _poison(self) -> None:
        """NaN into every slot that holds no token of a sequence."""
        size = self.spec.block_size
        dead = np.ones((self.pool.num_blocks, size), bool)
        for handle, history in self.history.items():
            table = self.pool.table(handle)
            for position in range(len(history)):
                dead[table[position // size], position % size] = False
        slots = np.flatnonzero(dead).astype(np.int32)
        for layer in range(self.spec.num_layers):
            shape = (slots.size, self.spec.num_kv_heads)
            k, v = (np.full((*shape, dim), np.nan, np.float32) for _, dim in self.spec.planes)
            plan = StepArrays(slot_mapping=slots)
            write(self.backend, plan, layer, k, v)


_NAN = {"float32": b"\0\0\xc0\x7f", "float16": b"\0\x7e", "bfloat16": b"\xc0\x7f", "float8_e4m3": b"\x7f"}
_STATE = (StateArray((2, 3), "float32"), StateArray((), "int64"), StateArray((5,), "bfloat16"))


class GroupEngine(Engine):
    """An engine on a pool of several groups: every answer is compared with dense attention, and what states hold.

    A state is a function of the history. Before each step, all that no query may read is set to NaN: blocks that no
    table names, block 0 included, and slots of the others. All layers have one dtype. `layers` are (group, what is
    stored) of each layer of the model, `sources` the layer whose keys and values each reads: itself, or an earlier one.
    """

    turns: tuple[str, ...] = ("step",) * 13 + ("fork", "open") * 2 + ("close",)
    most_open, most_rows = 6, 4

    def __init__(
        self,
        storage: GroupStorage,
        pool: Pool,
        layers: Sequence[tuple[int, KVSpec]],
        sources: Sequence[int],
        seed: int = SEED,
        evicts: bool = False,
    ) -> None:
        super().__init__(pool, storage.required_formats, 64, [spec for _, spec in layers], seed)
        self.storage, self.layers, self.sources = storage, layers, sources
        self.turns += ("evict",) * 2 * evicts  # the backend moves tokens
        #: (sequence, layer) -> positions that an eviction left, and the length at which it did
        self.left: dict[tuple[int, int], tuple[list[int], int]] = {}

    def fork(self, handle: int) -> int:
        """A child with the same history, that has lost the same."""
        child = super().fork(handle)
        self.left |= {(child, layer): left for (seq, layer), left in self.left.items() if seq == handle}
        return child

    def _held(self, handle: int, layer: int) -> list[int]:
        """Positions of the tokens that a sequence has not lost in a layer, in the order of their places."""
        left, length = self.left.get((handle, self.sources[layer]), ([], 0))
        return [*left, *range(length, len(self.history[handle]))]

    def evict(self, handle: int) -> None:
        """Tokens leave the full groups: others in each layer."""
        for number, group in enumerate(self.storage.groups):
            mine = [i for i, (g, _) in enumerate(self.layers) if g == number and self.sources[i] == i]
            if group.kind != "full":
                continue
            held, spec = len(self._held(handle, mine[0])), self.layers[mine[0]][1]
            target = int(self.rng.integers(held + 1))
            try:
                self.pool.unshare(self.plan, [handle], target, group=number)
            except OutOfBlocks:
                return
            self.storage.copy_blocks(self.plan)
            self.pool.done(self.plan)
            table = self.pool.table(handle, number)[: -(-held // spec.block_size)]
            self.pool.compact(handle, target, group=number)
            num_layers = group.columns * spec.num_layers
            keep = [np.sort(self.rng.choice(held, target, replace=False)) for _ in range(num_layers)]
            self.storage.compact(number, table, np.stack([[places] * spec.num_kv_heads for places in keep]))
            for places, layer in zip(keep, mine, strict=False):
                positions = self._held(handle, layer)
                self.left[handle, layer] = [positions[place] for place in places], len(self.history[handle])

    def step(self, handles: list[int], counts: list[int]) -> bool:
        """Give each row so many new tokens. Returns False if there are too few blocks."""
        new = [self.rng.integers(VOCABULARY, size=count).tolist() for count in counts]
        self._poison()
        try:
            self.pool.step(self.plan, np.array(handles), np.array(counts))
        except OutOfBlocks:
            return False
        step = self.storage.prepare(self.plan)
        self.storage.copy_blocks(self.plan)
        self._states(handles, new)
        for handle, tokens in zip(handles, new, strict=True):
            self.history[handle] += tokens
        flat = np.array([token for tokens in new for token in tokens], np.int64)
        for layer in range(len(self.layers)):
            if self.sources[layer] == layer:
                self.storage.write(step, layer, *(self.storage.asarray(x[flat]) for x in self.tokens[layer]))
            self._compare(step, layer, handles, counts)
        if self.rng.random() < 0.15:
            self.pool.rollback(self.plan)
            for handle, tokens in zip(handles, new, strict=True):
                del self.history[handle][len(self.history[handle]) - len(tokens) :]
        else:
            self.pool.done(self.plan)
        self.num_steps += 1
        return True

    def _compare(self, step: Any, layer: int, handles: list[int], q_lens: Sequence[int]) -> None:
        number, spec = self.layers[layer]
        keys, given = self.tokens[self.sources[layer]]
        read = [self.storage.to_numpy(x) for x in self.storage.read(step, layer)]
        seen = self.storage.seen(step, layer)
        q = values(self.rng, (sum(q_lens), 2 * spec.num_kv_heads, spec.head_dim), spec.dtype)
        out = self.storage.to_numpy(self.storage.attend(step, layer, self.storage.asarray(q)))
        rows: list[tuple[Any, ...]] = []
        what, begin = f"step {self.num_steps}, layer {layer} of group {number}, seed {self.seed}", 0
        for handle, n in zip(handles, q_lens, strict=True):
            if n:
                held, length = self._held(handle, layer), len(self.history[handle])
                mask = seen_by_rule(self.storage.groups[number], length - n, length)[:, held]
                tokens = [self.history[handle][position] for position in held]
                rows.append((n, keys[tokens], given[tokens], None, AttentionOptions(mask=mask)))
                row, token = handles.index(handle), begin + n - 1
                for plane, right in zip(read, (keys, given), strict=True):
                    found = plane[row, :, : seen.shape[1]][:, seen[token]].swapaxes(0, 1)
                    assert np.array_equal(found, right[tokens][mask[-1]]), f"row {row} reads another context ({what})"
            begin += n
        close(out, dense_rows(q, spec.value_head_dim, rows), spec, what)

    def _states(self, handles: list[int], new: list[list[int]]) -> None:
        """What slots hold is what the histories say; then they hold the next states."""
        for number, slots in self.storage.states.items():
            arrays = self.plan.groups[number]
            found = slots.read(arrays.state_src)
            for row, (handle, tokens) in enumerate(zip(handles, new, strict=True)):
                for got, right in zip(found, _state_of(self.history[handle]), strict=True):
                    if tokens:
                        assert np.array_equal(got[row], right), f"state of row {row} is another (seed {self.seed})"
            states = [_state_of(self.history[h] + tokens) for h, tokens in zip(handles, new, strict=True)]
            slots.write(arrays.state_dst, [np.stack(column) for column in zip(*states, strict=True)])

    def _poison(self) -> None:
        live = [np.zeros((n, self.storage.block_nbytes(k)), bool) for k, n in enumerate(self.storage.num_blocks)]
        for number, group in enumerate(self.storage.groups):
            for handle in self.history if group.kind != "state" else ():
                spec = next(spec for g, spec in self.layers if g == number)
                layer = next(i for i, (g, _) in enumerate(self.layers) if g == number)
                table, length = self.pool.table(handle, number), len(self._held(handle, layer))
                first = max(0, length - group.size + 1) if group.kind == "window" and not group.keep else 0
                for entry, blocks in enumerate(table[: -(-length // spec.block_size)].tolist()):
                    begin, end = (at - entry * spec.block_size for at in (first, length))
                    used = _token_bytes(spec, max(0, begin), min(spec.block_size, end))
                    if any(other != spec for g, other in self.layers if g == number):
                        used = np.ones(self.storage.block_nbytes(group.arena), bool)  # only whole blocks are poisoned
                    for block in blocks:
                        live[group.arena][block, : len(used)] |= used & (block > 0)
        for arena, used in enumerate(live):
            blocks = np.arange(len(used))
            nothing = np.resize(np.frombuffer(_NAN[self.layers[0][1].dtype], np.uint8), used.shape[1])
            data = np.where(used, self.storage.export_blocks(blocks, arena), nothing)
            self.storage.import_blocks(blocks, data, arena)


def seen_by_rule(group: Group, first: int, end: int) -> np.ndarray:
    """Which of `end` positions the queries at positions ``first .. end - 1`` read, as docs/core.md has it."""
    return np.array([[_reads(group, p, c) for c in range(end)] for p in range(first, end)], bool).reshape(-1, end)


def _token_bytes(spec: KVSpec, begin: int, end: int) -> np.ndarray:
    """Which bytes of a block the tokens at ``begin .. end - 1`` have."""
    found = np.zeros(spec.block_nbytes, bool)
    for up_to_end, before in zip(token_columns(spec, end), token_columns(spec, begin), strict=True):
        found[before.stop : up_to_end.stop] = begin < end
    return found


def _reads(group: Group, p: int, c: int) -> bool:
    if c > p:
        return False
    if group.kind == "window":
        return c > p - group.size or c < group.keep
    return group.kind != "chunk" or c // group.size == p // group.size


def _state_of(history: Sequence[int]) -> tuple[np.ndarray, ...]:
    """A state that depends on every token and on their order; all zeros for none."""
    number = 0
    for token in history:
        number = (31 * number + token + 1) % 65_521
    return (
        np.full((2, 3), number, np.float32) * np.array([[1], [-2]], np.float32),
        np.array(number * 2**40),
        np.full(5, number, np.uint16),
    )


# ---------------------------------------------------------------------- pools


def _block_sizes(factory: Factory) -> tuple[int, int]:
    """A block size that the backend has, and its double where it has that too."""
    sizes = capabilities_of(factory).block_sizes
    if sizes is None:
        return 4, 8
    return sizes[0], 2 * sizes[0] if 2 * sizes[0] in sizes else sizes[0]


def _two_shapes(factory: Factory, layout: str) -> Iterator[tuple[KVSpec, KVSpec]]:
    """Two specs of other heads and block sizes, whose blocks have the same bytes where block sizes allow it."""
    size, double = _block_sizes(factory)
    for spec in specs(factory, kv_heads=2, layers=2, block_sizes=(size,), layouts=(layout,), q_heads=4):
        yield spec, replace(spec, num_kv_heads=1, block_size=double)


def engine(
    factory: Factory, kinds: Sequence[Group], wide: KVSpec, narrow: KVSpec, *, shared: bool, seed: int = SEED
) -> GroupEngine:
    """An engine on groups of two shapes in turn, with two columns each, a state group, and a layer that shares."""
    groups, stored = [], []
    for number, group in enumerate(kinds):
        spec = (wide, narrow)[number % 2]
        arena = 0 if shared else number % 2
        num_blocks = 60 if arena and number == 1 else None
        groups.append(replace(group, columns=2, arena=arena, block_size=spec.block_size, num_blocks=num_blocks))
        stored.append(spec)
    pool = Pool(90, wide.block_size, max_seqs=8, lookahead=2, groups=[*groups, Group.state(24)])
    places = [(g, i) for g, spec in enumerate(stored) for i in range(2 * spec.num_layers - 1)]
    places.append(places[0])  # the last layer reads what the first one stores
    storage = GroupStorage(factory, pool, [*stored, _STATE], places)
    layers = [(g, stored[g]) for g, _ in places]
    evicts = capabilities_of(factory).compacts
    return GroupEngine(storage, pool, layers, [*range(len(places) - 1), 0], seed, evicts)


def _kinds(factory: Factory) -> list[Group]:
    """Groups whose attention the backend has."""
    features = capabilities_of(factory).features
    kinds = [Group.full(), Group.full()]
    if "window" in features:
        kinds[1] = Group.window(11)
    if "mask" in features:
        kinds += [Group.chunk(12), Group.window(13, keep=3)]
    return kinds


# ---------------------------------------------------------------------- cases


@case
def groups_equal_dense_attention(factory: Factory) -> None:
    """Full, window, chunk, a window that keeps tokens, and states: a random engine, each shape in an arena."""
    layout = capabilities_of(factory).layouts[0]
    for wide, narrow in _two_shapes(factory, layout):
        run = engine(factory, _kinds(factory), wide, narrow, shared=False)
        run.play(range(60))
        assert run.num_steps > 25, "the engine is too idle to prove anything"


@case
def shapes_in_one_arena_equal_dense_attention(factory: Factory) -> None:
    """Layout "block": groups of two shapes take the same blocks in turn, and nobody reads what another one left."""
    need("block" in capabilities_of(factory).layouts)
    for wide, narrow in _two_shapes(factory, "block"):
        run = engine(factory, _kinds(factory), wide, narrow, shared=True)
        run.play(range(60))
        assert run.num_steps > 25, "the engine is too idle to prove anything"


@case
def layers_of_one_group_may_differ(factory: Factory) -> None:
    """Layout "block": heads and dimensions change from layer to layer of a column, over one table."""
    can = capabilities_of(factory)
    need("block" in can.layouts)
    for spec in specs(factory, kv_heads=2, layers=1, block_sizes=_block_sizes(factory)[:1], layouts=("block",)):
        widths = (spec.head_dim, 12) if can.head_dims is None and can.mixed_head_dims else (spec.head_dim,) * 2
        column = [spec, replace(spec, num_kv_heads=1, v_head_dim=widths[1]), replace(spec, num_kv_heads=3)]
        pool = Pool(50, spec.block_size, max_seqs=8, groups=[Group.full(columns=2), Group.full()])
        storage = GroupStorage(factory, pool, [column, spec])
        run = GroupEngine(storage, pool, [*((0, part) for part in [*column, *column]), (1, spec)], range(7))
        run.play(range(30))
        assert run.num_steps > 10, "the engine is too idle to prove anything"


@case
def given_rows_are_used_and_nothing_between_them(factory: Factory) -> None:
    """Layout "block": ``storage=`` holds what is written, as `export_blocks` has it; bytes between rows stay."""
    need("block" in capabilities_of(factory).layouts)
    for spec in specs(factory, layouts=("block",), layers=2):
        arena = np.full((5, spec.block_nbytes + 48), 0xA5, np.uint8)
        rows = arena[:, 16 : 16 + spec.block_nbytes]
        backend = factory(spec, 5, storage=rows)  # type: ignore[call-arg]
        rng = np.random.default_rng(SEED)
        fill_all(backend, rng)
        same_bytes(rows, everything(backend), "the rows that were given")
        expected = rows.copy()
        backend.copy_blocks(int32([[3, 1, spec.block_size]]))
        backend.zero([2])
        backend.import_blocks([4], expected[3:4])
        backend.settle()
        expected[[1, 4]], expected[2] = expected[3], 0
        same_bytes(rows, expected, "copies, zeros and imports in given rows")
        arena[:, 16 : 16 + spec.block_nbytes] = 0xA5
        assert (arena == 0xA5).all(), "bytes between the rows have changed"


@case
def states_travel_in_blocks(factory: Factory) -> None:
    """A state is saved in any blocks, in any order, and comes back the same, byte for byte; other blocks stay."""
    for spec in specs(factory, dtypes=("float32", "bfloat16", "float8_e4m3"), block_sizes=_block_sizes(factory)[:1]):
        pool = Pool(20, spec.block_size, max_seqs=2, groups=[Group.full(), Group.state(4)])
        num_floats = spec.block_nbytes // 2
        arrays = [StateArray((num_floats,), "float32"), StateArray((3,), "uint8")]
        storage = GroupStorage(factory, pool, [spec, arrays])
        assert storage.bundle_blocks(1) == 3, "two blocks and three bytes need three blocks"
        rng = np.random.default_rng(SEED)
        slots, marks = storage.states[1], rng.integers(0, 256, (20, spec.block_nbytes), np.uint8)
        storage.import_blocks(np.arange(20), marks)
        states = rng.integers(0, 256, (4, slots.slot_nbytes), np.uint8)
        slots.import_slots(np.arange(4), states)
        bundles = int32([[7, 3, 12], [18, 1, 5]])
        storage.save_states(1, [2, 0], bundles)
        slots.zero([0, 1, 2])
        storage.load_states(1, bundles[::-1], [1, 2])
        same_bytes(slots.export_slots([1, 2, 3]), states[[0, 2, 3]], "states that were saved and loaded")
        others = np.setdiff1d(np.arange(20), bundles)
        same_bytes(storage.export_blocks(others), marks[others], "blocks beside the bundles")


@case
def latents_are_stored_and_read(factory: Factory) -> None:
    """Latents and rotary parts of any two widths: written, copied, read and gathered; attended to, or refused."""
    can = capabilities_of(factory)
    dims = (16, 4) if can.head_dims is None and can.mixed_head_dims else (8, 8)
    for plain in specs(factory, kv_heads=1, q_heads=1, head_dims=dims, block_sizes=(8,)):
        spec = replace(plain, latent=True)
        filled = fill(factory, spec, [9, 4, 17])
        filled.backend.warmup([BatchShape(3, 3, filled.tables.shape[1], 1)])
        step = filled.backend.prepare(filled.plan([1, 1, 1]))
        for layer in range(spec.num_layers):
            read = [filled.backend.to_numpy(x) for x in filled.backend.read(step, layer)]
            table = filled.tables[2, : -(-17 // spec.block_size)]
            gathered = [filled.backend.to_numpy(x) for x in filled.backend.gather(layer, table, 17)]
            for plane, again, right in zip(read, gathered, (filled.k[layer], filled.v[layer]), strict=True):
                for row, tokens in enumerate(right):
                    assert np.array_equal(plane[row, :, : len(tokens)].swapaxes(0, 1), tokens), f"row {row} is another"
                assert np.array_equal(again, right[2]), "a gathered latent is another"
        if can.latent:
            for q_lens in ([1, 1, 1], [5, 0, 12]):
                filled.check(q_lens, 3, f"chunks {q_lens} on latents")
        else:
            attends = partial(attend, filled.backend, 0, filled.queries([1, 1, 1], 1), filled.plan([1, 1, 1]))
            refused(attends, ValueError, "attend on latents")


@case
def gaps_in_tables_are_not_read(factory: Factory) -> None:
    """A window in the middle of a table of holes: neither block 0 nor the blocks that were let go are read."""
    need("window" in capabilities_of(factory).features)
    size = _block_sizes(factory)[0]
    for spec in specs(factory, block_sizes=(size,)):
        pool = Pool(40, size, max_seqs=2, groups=[Group.window(size + 1), Group.full()])
        storage = GroupStorage(factory, pool, [spec, spec])
        run = GroupEngine(storage, pool, [(g, spec) for g in (0, 0, 1, 1)], range(4))
        for _ in range(2):
            run.history[pool.open()] = []
        for _ in range(3 * size):
            run.step(list(run.history), [3, 1])
        holes = [int((pool.table(handle, 0) == 0).sum()) for handle in run.history]
        assert min(holes) >= 1 and max(holes) >= 6, f"the tables have {holes} holes"
        k = storage.to_numpy(storage.read(storage.prepare(run.plan), 0)[0])
        assert k.shape[2] <= 2 * size + 2, f"{k.shape[2]} positions are read for a window of {size + 1}"
