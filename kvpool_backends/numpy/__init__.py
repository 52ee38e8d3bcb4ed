"""The reference backend: exact and simple. It runs everywhere, and other backends are compared with it."""

from kvpool_backends.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
