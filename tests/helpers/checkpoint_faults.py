"""Faults of the prefix cache with layer groups, planted in the plain model."""

from kvpool.testing import ModelPool


class OutlivesItsKeys(ModelPool):
    """A checkpoint stays when the keys and values of its node leave."""

    evicting = False

    def _is_free(self, mark):
        return not self.evicting and super()._is_free(mark)

    def _evict_unit(self, node):
        self.evicting = True
        super()._evict_unit(node)
        self.evicting = False


class WholePathRefreshed(ModelPool):
    """A hit makes every checkpoint on its path the most recent."""

    def _begin_at(self, call, found):
        for node in found.nodes:
            if node.checkpoint is not None:
                node.checkpoint.stamp = self._tick()
        return super()._begin_at(call, found)


class RoomForAll(ModelPool):
    """There is room for any number of checkpoints."""

    def _has_room(self):
        return True


class UsesDoNotCount(ModelPool):
    """A checkpoint that was never a hit stays as long as others."""

    def _age(self, one):
        return self._clock - one.stamp


class PublishedUnwritten(ModelPool):
    """A block is published though the copy that fills it is pending."""

    def is_unwritten(self, layer, block):
        return False


#: The order in which things leave differs; seen when they do, one by one.
WRONG_ORDER = [OutlivesItsKeys, WholePathRefreshed, UsesDoNotCount, RoomForAll]
