"""The reference backend: exact, simple, runs everywhere; what other backends are measured against."""

from kvpool_backends.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
