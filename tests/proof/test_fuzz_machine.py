"""The core beside the model and beside a fake backend, for many random programs.

``KVPOOL_FUZZ_EXAMPLES`` scales how many (500 by default, 5,000 in the long form), ``KVPOOL_FUZZ_SEED`` repeats a run:
the seed is printed, and a failure comes with the shortest program found.
"""

from __future__ import annotations

import os

from fuzz_seed import fresh_seed

from kvpool import Plan, Pool
from kvpool.testing import ModelPlan, ModelPool
from proof.machine.machine import run

EXAMPLES = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "1000")) // 2


def test_core_random_programs_agree_with_the_model_and_the_content() -> None:
    run(Pool, Plan, examples=EXAMPLES, steps=50, seed=fresh_seed())


def test_model_random_programs_keep_the_content() -> None:
    run(ModelPool, ModelPlan, examples=EXAMPLES // 10, steps=50, seed=fresh_seed())
