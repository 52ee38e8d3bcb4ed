"""What tests of `tests/regressions`, and of plans in flight, ask of a pool at the end."""


def idle(pool):
    """No sequence, no reference, nothing pending: every block is blank or cached."""
    stats = pool.stats()
    pool.check()
    return (
        (stats.used, stats.limbo, stats.sequences, stats.pending, stats.shared) == (0, 0, 0, 0, 0)
        and stats.free == stats.num_blocks - stats.reserved
        and pool.blocks.refcount_histogram().tolist() == [stats.num_blocks - stats.reserved]
    )
