from typing import Any

from typing_extensions import disjoint_base

from kvpool._sequence_calls import SequencePool

@disjoint_base
class EventPool(SequencePool):
    def drain_events(self) -> list[tuple[Any, ...]]: ...
