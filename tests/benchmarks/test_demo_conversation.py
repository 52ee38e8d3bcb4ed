"""The demo's long conversation: its claims hold, and each is lost by the fault that it is about."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.demo import models
from benchmarks.demo.settings import AllSettings
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.cli import demo
from kvpool.eviction import H2O, Memory

SMALL = AllSettings(talk_tokens=70, talk_budget=32, block_size=8)


def lost(settings=SMALL):
    report = demo.run_parts(settings, [models.CONVERSATION], lambda line: None)
    assert not report.not_run
    return {name for name, held in report.claims.items() if not held}


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_claims_hold_with_any_block_size(block_size):
    assert lost(replace(SMALL, block_size=block_size)) <= {"one_block_more_than_rotating"}  # whole blocks count


def nobody_leaves(monkeypatch):
    monkeypatch.setattr(H2O, "lens_after", lambda self, lens, block_size: lens)


def positions_restart(monkeypatch):
    offset = PagedKVCache.offset.fget
    monkeypatch.setattr(PagedKVCache, "offset", property(lambda self: offset(self) - int(self.batch.rows.gone[0])))


def the_newest_alone(monkeypatch):
    def select(self, row, kv_len, target):
        shape = (self.scores.shape[0], self.scores.shape[2], target)
        places = np.r_[: self.policy.sink, kv_len - target + self.policy.sink : kv_len]
        return np.broadcast_to(places, shape).copy()

    monkeypatch.setattr(Memory, "select", select)


@pytest.mark.parametrize(
    "fault, claim",
    [(nobody_leaves, "budget_held"), (positions_restart, "positions_go_on"), (the_newest_alone, "remembers_older")],
)
def test_fault_is_seen_by_its_claim(monkeypatch, fault, claim):
    fault(monkeypatch)
    assert claim in lost()
