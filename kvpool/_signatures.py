"""Signatures of the constructors of the core's classes, which pass their arguments to these functions.

So the error of a wrong call says ``Pool()`` and not ``__cinit__()``.
"""


def Pool(
    num_blocks,
    block_size,
    *,
    max_seqs=1024,
    max_blocks_per_seq=None,
    reserved_blocks=1,
    watermark=0,
    in_order=False,
    seed=None,
    prefix_cache=False,
    events=0,
    lookahead=0,
    groups=None,
    _hash_bits=32,
):
    return tuple(locals().values())


def Plan(
    pool,
    max_rows,
    max_tokens=None,
    *,
    formats=("block_tables", "seq_lens", "slot_mapping"),
    table_width=None,
    dtype="int32",
    pad=None,
    out=None,
    backend=None,
):
    return tuple(locals().values())
