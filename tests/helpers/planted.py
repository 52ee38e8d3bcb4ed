"""Faults that a test plants, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Faults(dict[str, Callable[[], AbstractContextManager[None]]]):
    """A decorator of generators that plant a fault and yield. It keeps each as a context manager, by its name."""

    def __call__(self, plant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        self[plant.__name__] = contextmanager(plant)
        return plant
