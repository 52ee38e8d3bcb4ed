"""The seed of random programs: another one each time, printed, so that a run can be repeated."""

import os
import secrets


def fresh_seed() -> int:
    """``KVPOOL_FUZZ_SEED``, or a new one."""
    seed = int(os.environ.get("KVPOOL_FUZZ_SEED", secrets.randbits(32)))
    print(f"repeat with KVPOOL_FUZZ_SEED={seed}")
    return seed
