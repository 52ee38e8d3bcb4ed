"""Faults of backends that the conformance kit has to catch."""

import pytest

from kvpool.testing import conformance


def assert_caught(fault, name):
    """The case of this name fails on a backend."""
    cases = [case for case in conformance.CASES if case.__name__ == name]
    with pytest.raises(AssertionError, match="1 of 1 cases failed"):
        conformance.check_backend(fault, cases)
