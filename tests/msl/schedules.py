"""Runs a call under several schedules: a kernel's result must not depend on which thread runs first."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .arrays import to_numpy
from .launch import Run, settings
from .prepass import MetalError


def under_schedules(
    call: Callable[[], Sequence[Any]], seeds: Iterable[int] = range(5), **chosen: Any
) -> tuple[Sequence[Any], list[Run]]:
    """Return what `call` returns, a sequence of arrays, and the launches of all seeds.

    Parameters
    ----------
    seeds : schedules to run, see `settings`
    chosen : further arguments of `settings`

    Raises
    ------
    MetalError
        The arrays of two seeds differ in a bit, or a launch failed under one of them; the message names the seed.
    """
    first: Sequence[Any] = ()
    first_seed, runs = None, []
    for seed in seeds:
        try:
            with settings(seed=seed, **chosen) as launches:
                results = call()
        except MetalError as error:
            raise MetalError(f"{error} (seed {seed})") from error
        runs += launches
        if first_seed is None:
            first, first_seed = results, seed
            continue
        for number, (one, other) in enumerate(zip(first, results, strict=True)):
            differ = np.flatnonzero(_bits(one) != _bits(other))
            if differ.size:
                raise MetalError(
                    f"[schedules] result {number} depends on the schedule: {differ.size} bytes differ between seeds "
                    f"{first_seed} and {seed}, the first at byte offset {differ[0]}"
                )
    return first, runs


def _bits(array: Any) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(to_numpy(array)).tobytes(), np.uint8)
