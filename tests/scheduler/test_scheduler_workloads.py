"""Random workloads: every output is what decoding alone gives, no block is missing, every step keeps the rules."""

from collections import Counter

import pytest
from scheduler_workload import Runner, draw, draw_crowd, numbers

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workload_gives_what_decoding_alone_gives(part):
    for seed in numbers(60, 1000)[part::PARTS]:
        Runner(draw(seed)).run()


@pytest.mark.long
def test_crowd_is_admitted_in_the_order_of_the_plain_rules():
    """`Turns` judges each admission: whose turn it is, who may pass, what each tenant has used."""
    seeds = numbers(15, 250)
    passed = sum(Runner(draw_crowd(seed)).run().watch.turns.overtakings for seed in seeds)
    assert passed > len(seeds)


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
    reached = Counter()
    for workload in map(draw, range(60)):
        requests, options = [request for _, request in workload.arrivals], workload.scheduler
        happens = {name: getattr(workload, name) for name in ("exact", "cancels", "fail_rate", "guests", "tier")}
        happens |= {"deadlines": workload.patience, "bounded queue": "max_waiting" in options}
        happens |= {"not mixed": not options["mixed"], "chunks of one token": options["prefill_chunk"] == 1}
        happens |= {"samples": any(r.n > 1 and not r.beam_width for r in requests)}
        happens |= {"beams": any(r.beam_width for r in requests), "tenants": len({r.tenant for r in requests}) > 1}
        reached.update({name: bool(value) for name, value in happens.items()})
    assert min(reached.values()) >= 3, reached
