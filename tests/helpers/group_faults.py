"""Pools with layer groups that have one planted fault each; what compares and judges pools has to find it."""

from __future__ import annotations

from kvpool.testing.model_groups import HOLE, Arena, GroupModel


class Faulty(GroupModel):
    """A pool that does not look at itself."""

    def check(self):
        """Nothing is wrong."""


class WindowOffByOne(Faulty):
    def _let_go(self, seq, layer, p):
        super()._let_go(seq, layer, p + (layer.kind == "window"))


class ChunkOffByOne(Faulty):
    def _let_go(self, seq, layer, p):
        super()._let_go(seq, layer, p + (layer.kind == "chunk"))


class LetsGoWhenIssued(Faulty):
    def _started(self, call, step, new):
        super()._started(call, step, new)
        for row in step.rows:
            for layer in self.layers:
                self._let_go(self._find(row.handle), layer, row.length - self.lookahead)


class NoLimbo(Faulty):
    def _release_in(self, arena, block):
        if not arena._refcount(block) and block not in arena._holds:
            arena._leave(block)


class StateShared(Faulty):
    def _group_need(self, seq, n, layer, lost, reads):
        if layer.kind == "state" and seq.tables[layer.index].entries:
            return [], 0
        return super()._group_need(seq, n, layer, lost, reads)


class WrongArena(Faulty):
    def _take_entry(self, layer):
        first = self.arenas[0]
        if layer.kind != "state" and len(first._blank) > layer.columns:
            return [first._take() for _ in range(layer.columns)]
        return super()._take_entry(layer)


class ColumnNotReplaced(Faulty):
    def _change(self, step, layer, table, change, replaced, appended):
        super()._change(step, layer, table, change, replaced, appended)
        for i, old, new in change.replaced:
            if len(new) > 1:
                table.entries[i] = [*new[:-1], old[-1]]


class ColumnNotCopied(Faulty):
    def _begin(self, plan, batch, needs):
        step = super()._begin(plan, batch, needs)
        step.copies = [c for k, c in enumerate(step.copies) if not k or self.layers[c[0]].columns == 1]
        return step


class LookaheadForgotten(Faulty):
    def _let_go(self, seq, layer, p):
        super()._let_go(seq, layer, p + self.lookahead)


class KeepForgotten(Faulty):
    def _let_go(self, seq, layer, p):
        table = seq.tables[layer.index]
        super()._let_go(seq, layer, p)
        first = table.entries[0] if table.entries else HOLE
        if layer.num_kept and first is not HOLE and layer.block_size <= layer.last_unread(p):
            table.entries[0] = HOLE
            for block in first:
                self._release_in(layer.arena, block)


class FloorForgotten(Faulty):
    def _floor_in(self, layer, block):
        return 0


class EarlierPlanSeesLaterTables(Faulty):
    def _begin(self, plan, batch, needs):
        earlier = list(self._pending)
        step = super()._begin(plan, batch, needs)
        for old in earlier:
            for r, row in enumerate(old.rows):
                seq = self._find(row.handle)
                for layer in self.layers if seq is not None else ():
                    if layer.kind != "state":
                        entries = seq.tables[layer.index].entries
                        old.plan.groups[layer.index].block_tables[r, : len(entries)] = self.shown(layer, entries)
        return step


class EpochStays(Faulty):
    def _let_go(self, seq, layer, p):
        epoch = seq.tables[layer.index].epoch
        super()._let_go(seq, layer, p)
        seq.tables[layer.index].epoch = epoch


class StateFreedWhenIssued(Faulty):
    def _change(self, step, layer, table, change, replaced, appended):
        super()._change(step, layer, table, change, replaced, appended)
        for _, old, _ in change.replaced:
            if layer.kind == "state" and not layer.arena._refcount(old[0]):
                layer.arena._blank.append(old[0])

    def _release_in(self, arena, block):
        if block not in arena._blank:
            super()._release_in(arena, block)


class StateKeptByRollback(Faulty):
    def _undo_change(self, seq, layer, change):
        if layer.kind == "state" and seq is not None and change.replaced:
            ((_, (old,), _),) = change.replaced
            layer.arena._holds.remove(old)
            self._release_in(layer.arena, old)
        else:
            super()._undo_change(seq, layer, change)


class ColumnLeftBehind(Faulty):
    def _let_go(self, seq, layer, p):
        entries = seq.tables[layer.index].entries
        for i, entry in enumerate(entries):
            if len(entry) > 1 and i >= layer.num_kept and (i + 1) * layer.block_size <= layer.last_unread(p):
                entries[i] = HOLE
                seq.tables[layer.index].epoch += 1
                for block in entry[:-1]:
                    self._release_in(layer.arena, block)
        super()._let_go(seq, layer, p)


class SpeaksForArena0(Arena):
    def _out_of_blocks(self, *needs, **where):
        Arena._out_of_blocks(self._pool.arenas[0], *needs, **where)


class NamesArena0(Faulty):
    arena_class = SpeaksForArena0


class LetsGoDescending(Faulty):
    def _let_go(self, seq, layer, p):
        if layer.kind == "state":
            return
        entries = seq.tables[layer.index].entries
        for i, entry in reversed(list(enumerate(entries))):
            if entry is not HOLE and i >= layer.num_kept and (i + 1) * layer.block_size <= layer.last_unread(p):
                entries[i] = HOLE
                seq.tables[layer.index].epoch += 1
                for block in entry:
                    self._release_in(layer.arena, block)


class UpdatesForgetRollback(Faulty):
    def _forget_told(self, seq):
        pass


class UpdatesForgetHoles(Faulty):
    def _let_go(self, seq, layer, p):
        table = seq.tables[layer.index]
        super()._let_go(seq, layer, p)
        table.told = [told and entry for told, entry in zip(table.told, table.entries, strict=False)]


class UpdatesForgetCut(Faulty):
    def _cut_told(self, table, length):
        pass


class RoomOfStatesNotRounded(Faulty):
    def _capacity(self, seq):
        return super()._capacity(seq) if self._with_entries else seq.num_tokens


class CachedWrittenInPlace(Faulty):
    def _group_need(self, seq, n, layer, lost, reads):
        layer.arena._committed, committed = set(), layer.arena._committed
        need = super()._group_need(seq, n, layer, lost, reads)
        layer.arena._committed = committed
        return need


class HeldBlocksLeave(Faulty):
    def _release_in(self, arena, block):
        arena._raw, raw = {}, arena._raw
        super()._release_in(arena, block)
        arena._raw = raw


class OneArenaForAllCalls(Faulty):
    def _arena(self, call, arena):
        return super()._arena(call, 0 if call == "blocks" else arena)


class ResetKeepsNotes(Faulty):
    def _reset(self):
        kept = [list(arena._dropped) for arena in self.arenas]
        super()._reset()
        for arena, dropped in zip(self.arenas, kept, strict=True):
            arena._dropped = dropped


class SharedCompacted(Faulty):
    def _not_own(self, seq, layer, length, first, before):
        return []


class LengthsForgetEviction(Faulty):
    def _lose_in(self, layer, seq, n, left):
        super()._lose_in(layer, seq, n, left)
        seq.tables[layer.index].evicted -= 1 if n % layer.block_size else 0


class ForksForgetEviction(Faulty):
    def fork(self, handle, n=1):
        children = super().fork(handle, n)
        for child in children:
            for table in self._sequence("fork", int(child)).tables:
                table.evicted = 0
        return children


class UpdatesForgetEviction(Faulty):
    def _lose_in(self, layer, seq, n, left):
        super()._lose_in(layer, seq, n, len(seq.tables[layer.index].told))


class PointForgotten(Faulty):
    def _lose_in(self, layer, seq, n, left):
        super()._lose_in(layer, seq, n, left)
        seq.point = 0


class WindowsLoseTokens(Faulty):
    def _full_layers(self, call, group):
        return self.layers[group] if self.layers[group].kind == "window" else super()._full_layers(call, group)


#: Faults after which a query reads the wrong content, or blocks are lost: found without another pool.
OF_CONTENT = (
    *(WindowOffByOne, ChunkOffByOne, LetsGoWhenIssued, NoLimbo, StateShared, WrongArena, ColumnLeftBehind),
    *(ColumnNotReplaced, ColumnNotCopied, LookaheadForgotten, KeepForgotten, FloorForgotten),
    *(EarlierPlanSeesLaterTables, StateFreedWhenIssued, StateKeptByRollback),
    *(UpdatesForgetRollback, UpdatesForgetHoles, UpdatesForgetCut),
    *(SharedCompacted, LengthsForgetEviction, ForksForgetEviction, UpdatesForgetEviction),
)
#: Faults that only another pool tells.
OF_ORDER = (
    *(NamesArena0, EpochStays, LetsGoDescending, RoomOfStatesNotRounded, PointForgotten, WindowsLoseTokens),
    *(CachedWrittenInPlace, HeldBlocksLeave, OneArenaForAllCalls, ResetKeepsNotes),
)
