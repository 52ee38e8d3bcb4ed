"""A backend with one fault, for ``kvpool fuzz --target``: it leaves the copies of a plan out."""

from kvpool_backends.numpy import NumpyBackend


class Broken(NumpyBackend):
    """Copies are what forks need; everything else is right."""

    def copy_blocks(self, *args, **options):
        """Nothing."""
