"""Random workloads: every output is what decoding alone gives, no block is missing, every step keeps the rules.

``KVPOOL_FUZZ_EXAMPLES`` scales how many (60 by default), ``KVPOOL_LONG=1`` makes them 1,000; ``KVPOOL_WORKLOAD=17``
runs number 17 alone. A failure names its number.
"""

import os

import pytest
from scheduler_workload import Runner, draw, draw_crowd

LONG = bool(os.environ.get("KVPOOL_LONG"))
COUNT = 1000 if LONG else max(1, 60 * int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "1000")) // 1000)
ONLY = os.environ.get("KVPOOL_WORKLOAD")
PARTS = 10


@pytest.mark.parametrize("part", range(1 if ONLY else PARTS))
def test_random_workload_gives_what_decoding_alone_gives(part):
    for seed in [int(ONLY)] if ONLY else range(part, COUNT, PARTS):
        Runner(draw(seed), check_every=1 if ONLY else 7).run()


@pytest.mark.long
def test_crowd_is_admitted_in_the_order_of_the_plain_rules():
    """`Turns` judges each admission: whose turn it is, who may pass, what each tenant has used."""
    passed = 0
    for seed in range(max(1, COUNT // 4)):
        passed += Runner(draw_crowd(seed)).run().watch.turns.overtakings
    assert passed > COUNT // 4


class Late(Runner):
    """The same with a clock that is slow."""

    def clock(self):
        self.now += 100
        return self.now


def test_same_workload_takes_the_same_steps_whatever_the_clock_says():
    """Deterministic: same calls, same steps, to the last id."""
    workloads = [workload for workload in map(draw, range(5)) if not workload.patience]
    assert len(workloads) > 2
    for workload in workloads:
        one, two = (make(workload).run() for make in (Runner, Late))
        assert one.log == two.log
        assert one.scheduler.stats() == two.scheduler.stats()
        assert one.pool.fingerprint() == two.pool.fingerprint()


def test_workloads_cover_every_situation():
    """Workloads in which nothing happens would prove nothing: each of these happens in several of the first 60."""
    reached = {}
    for seed in range(60):
        workload = draw(seed)
        requests = [request for _, request in workload.arrivals]
        for name, happens in {
            "one request fits exactly": workload.exact,
            "samples": any(r.n > 1 and not r.beam_width for r in requests),
            "beams": any(r.beam_width for r in requests),
            "cancels": bool(workload.cancels),
            "failing steps": workload.fail_rate > 0,
            "guests": workload.guests,
            "tier": workload.tier,
            "not mixed": not workload.scheduler["mixed"],
            "chunks of one token": workload.scheduler["prefill_chunk"] == 1,
            "bounded queue": "max_waiting" in workload.scheduler,
            "tenants": len({request.tenant for request in requests}) > 1,
            "deadlines": bool(workload.patience),
        }.items():
            reached[name] = reached.get(name, 0) + bool(happens)
    assert min(reached.values()) >= 3, reached
