"""Pools with layer groups beside the model and beside the memory of contents, in programs that Hypothesis draws."""

from __future__ import annotations

import os

import pytest
from fuzz_seed import fresh_seed
from group_faults import CachedWrittenInPlace, LookaheadForgotten, StateShared, WindowOffByOne

from kvpool import Plan, Pool
from kvpool.testing import ModelPlan, ModelPool
from proof.machine.groups import run

EXAMPLES = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "1000"))


def test_core_random_programs_on_groups_agree_with_the_model_and_the_content() -> None:
    run(Pool, Plan, examples=EXAMPLES // 10, steps=40, seed=fresh_seed())


@pytest.mark.parametrize("fault", [WindowOffByOne, StateShared, LookaheadForgotten, CachedWrittenInPlace])
def test_planted_fault_is_found(fault: type[ModelPool]) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        run(fault, ModelPlan, examples=1_000, steps=40, seed=7, shrink=False)
