"""Faults planted into the shipped texts of Metal kernels, for the tests of those tests."""

import os
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from metal_engine import ENGINES
from msl import MetalError

from kvpool_backends.mlx import metal_kernels

ENGINE = ENGINES[os.environ.get("KVPOOL_METAL_ENGINE", "stand-in")]()


class Mutant(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    test: object
    arguments: tuple = (ENGINE,)


def convict(test, arguments):
    """A wrong result, a wrong count or an error of the launch; a text that does not compile counts as nothing."""
    with pytest.raises((AssertionError, MetalError)) as caught:
        test(*arguments)
    assert "the compiler refused" not in str(caught.value)


@contextmanager
def planted(mutant, monkeypatch):
    """The text of a file is another one, which is what all kernels are made of."""
    real = metal_kernels._file_text
    assert real(mutant.file).count(mutant.before) == 1, "the shipped text has changed: say again where the fault goes"
    changed = real(mutant.file).replace(mutant.before, mutant.after)
    monkeypatch.setattr(metal_kernels, "_file_text", lambda name: changed if name == mutant.file else real(name))
    metal_kernels.source_text.cache_clear()
    try:
        yield
    finally:
        metal_kernels.source_text.cache_clear()
