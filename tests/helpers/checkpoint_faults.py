"""Faults of the prefix cache with layer groups, planted in the plain model."""

from kvpool.testing.model_prefix_groups import CachedArena, CheckpointModel


class HitWithoutState(CheckpointModel):
    """A hit ends where the path ends, whether there is a checkpoint or not."""

    def _usable(self, path):
        return len(path) * self.block_size // self._grain * self._grain


class ShortWindow(CheckpointModel):
    """A checkpoint lacks the first entry of each window."""

    def _tails(self, seq, position):
        found = super()._tails(seq, position)
        firsts = [next((e for e in found or () if e.layer is layer), None) for layer in self._tailed]
        return None if found is None else [entry for entry in found if entry not in firsts]


class KeptTokensDropped(CheckpointModel):
    """A checkpoint lacks the entries that a window keeps."""

    def _tails(self, seq, position):
        found = super()._tails(seq, position)
        kept = [seq.tables[layer.index].entries[: layer.num_kept] for layer in self._tailed]
        return None if found is None else [e for e in found if all(e.blocks not in blocks for blocks in kept)]


class OtherNamespaces(CheckpointModel):
    """All namespaces have one root."""

    def _root(self, namespace):
        return super()._root(b"")

    def _path(self, tokens, namespace, most):
        return super()._path(tokens, b"", most)


class StaleStates(CheckpointModel):
    """A load reads a bundle that nobody holds any more."""

    def _is_free(self, mark):
        return mark.step is None


class OutlivesItsKeys(CheckpointModel):
    """A checkpoint stays when the keys and values of its node leave."""

    evicting = False

    def _is_free(self, mark):
        return not self.evicting and super()._is_free(mark)

    def _evict_unit(self, node):
        self.evicting = True
        super()._evict_unit(node)
        self.evicting = False


class BehindTheCut(CheckpointModel):
    """A checkpoint is taken one step of the grain behind the cut."""

    def _positions(self, hit, path, cut):
        return super()._positions(hit, path, cut + self._grain)


class StaleAfterFlush(CheckpointModel):
    """A flush leaves the nodes of open rows, and the checkpoints there."""

    def _flush(self, namespace):
        rows = [seq for seq in self._sequences.values() if seq.known.node is not None]
        kept = [(seq, seq.root, seq.known.node) for seq in rows if seq.known.node.checkpoint is None]
        found = super()._flush(namespace)
        for seq, root, node in kept:
            seq.root, seq.known.node = root, node
            while node is not None:
                self._nodes[node.root, node.prefix] = node
                node = node.parent
        return found


class WholePathRefreshed(CheckpointModel):
    """A hit makes every checkpoint on its path the most recent."""

    def _open_found(self, call, prompt, namespace, path, hit):
        for node in path[: hit // self.block_size]:
            if node.checkpoint is not None:
                node.checkpoint.stamp = self._tick()
        return super()._open_found(call, prompt, namespace, path, hit)


class RoomForAll(CheckpointModel):
    """There is room for any number of checkpoints."""

    def _has_room(self):
        return True


class OneClass(CheckpointModel):
    """No checkpoint leaves before its turn."""

    def _demote(self, mark):
        pass


class SecondForEver(CheckpointModel):
    """A checkpoint that is second class stays so, however often it is a hit."""

    def _open_found(self, call, prompt, namespace, path, hit):
        found = self._usable(path) and path[hit // self.block_size - 1].checkpoint
        is_second = bool(found) and found.is_second
        seq = super()._open_found(call, prompt, namespace, path, hit)
        if found:
            found.is_second = is_second
        return seq


class UsesDoNotCount(CheckpointModel):
    """A checkpoint that was never a hit stays as long as others."""

    def _age(self, one):
        return self._clock - one.stamp


class UncommittedArena(CachedArena):
    """Nothing is committed."""

    @property
    def _committed(self):
        return set()

    @_committed.setter
    def _committed(self, blocks):
        pass


class WrittenInPlace(CheckpointModel):
    """Committed entries are written in place."""

    arena_class = UncommittedArena


class PublishedUnwritten(CheckpointModel):
    """A block is published though the copy that fills it is pending."""

    def _is_unwritten(self, layer, block):
        return False


#: Steps read what their rows have not computed.
WRONG_CONTENT = [HitWithoutState, ShortWindow, KeptTokensDropped, OtherNamespaces, PublishedUnwritten]
#: Steps may read what is right; the pool finds, keeps or evicts something else than it should.
WRONG_CHOICE = [StaleStates, BehindTheCut, StaleAfterFlush, WrittenInPlace]
#: The order in which things leave differs; seen when they do, one by one.
WRONG_ORDER = [OutlivesItsKeys, WholePathRefreshed, UsesDoNotCount, RoomForAll, OneClass, SecondForEver]
