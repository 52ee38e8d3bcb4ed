"""Signature of `BlockStore`'s constructor; the error of a wrong call says ``BlockStore()``, not ``__cinit__()``."""


def BlockStore(spec, num_blocks, arrays, *, isa=None, num_threads=None):
    return tuple(locals().values())
