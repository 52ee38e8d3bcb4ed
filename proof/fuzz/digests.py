"""The digests of random programs, as one hash: the same on every build and every Python.

``python -m proof.fuzz.digests SEED RUNS`` prints it.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

from proof.fuzz._fuzz import Driver
from proof.fuzz.hunt import seeds
from proof.fuzz.shape import draw_shape

CALLS_PER_RUN = 1000
EVERY = 50  # calls between two entries


def digest_trace(seed: int, runs: int, counted: Counter[str] | None = None) -> str:
    """SHA-256 over digest and fingerprint after every so many calls of so many runs; `counted` gets their calls."""
    trace = hashlib.sha256()
    for run_seed, _ in zip(seeds(seed), range(runs), strict=False):
        driver = Driver(draw_shape(run_seed))
        for _ in range(CALLS_PER_RUN // EVERY):
            driver.run(EVERY)
            trace.update(driver.digest().to_bytes(8, "little"))
            trace.update(driver.fingerprint().to_bytes(8, "little"))
        if counted is not None:
            counted.update(driver.results()[0])
        driver.shutdown()
    return trace.hexdigest()


if __name__ == "__main__":
    print(digest_trace(int(sys.argv[1]), int(sys.argv[2])))
