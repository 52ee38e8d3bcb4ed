"""Faults of the prefix cache with layer groups, planted in the plain model."""

from kvpool.testing.model_prefix_groups import CheckpointModel


class OutlivesItsKeys(CheckpointModel):
    """A checkpoint stays when the keys and values of its node leave."""

    evicting = False

    def _is_free(self, mark):
        return not self.evicting and super()._is_free(mark)

    def _evict_unit(self, node):
        self.evicting = True
        super()._evict_unit(node)
        self.evicting = False


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


class UsesDoNotCount(CheckpointModel):
    """A checkpoint that was never a hit stays as long as others."""

    def _age(self, one):
        return self._clock - one.stamp


class PublishedUnwritten(CheckpointModel):
    """A block is published though the copy that fills it is pending."""

    def _is_unwritten(self, layer, block):
        return False


#: The order in which things leave differs; seen when they do, one by one.
WRONG_ORDER = [OutlivesItsKeys, WholePathRefreshed, UsesDoNotCount, RoomForAll]
