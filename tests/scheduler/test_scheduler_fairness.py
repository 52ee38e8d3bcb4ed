"""Tenants share by weight, nobody starves: what docs/scheduling.md promises, on random workloads, seen from outside.

``KVPOOL_FUZZ_SEED=7`` repeats a failure. Faults that are planted here are found by the same tests.
"""

from unittest import mock

import numpy as np
from fuzz_seed import fresh_seed

from kvpool import Pool, Request, Scheduler
from kvpool.scheduler.request import WaitingQueue

PROMPT, TOKENS = 24, 12  # the longest prompts, and answers


class Crowd:
    """Serves requests that all want their whole length, and counts from outside what each tenant gets."""

    def __init__(self, rng, running, **options):
        self.rng, self.running = rng, running
        blocks = int(rng.integers(2 * (PROMPT + TOKENS), 4 * (PROMPT + TOKENS)))
        self.pool = Pool(blocks // 2, 2, prefix_cache=bool(rng.random() < 0.5), seed=1)
        self.options = {"max_running": self.running, "prefill_chunk": 8, "max_step_tokens": 16} | options
        self.scheduler = Scheduler(self.pool, **self.options)
        self.waiting = {}  # request: tenant; those that no step has shown yet
        self.served = {}  # tenant: tokens, those of prompts when the request is first seen
        self.seen = set()  # the other requests
        self.ended = set()

    def add(self, tenant, prompt=PROMPT, **how):
        length = int(self.rng.integers(1, prompt + 1))
        start = int(self.rng.integers(6)) * 100
        name, most = len(self.waiting) + len(self.seen), int(self.rng.integers(1, TOKENS + 1))
        self.scheduler.add(Request(range(start, start + length), most, id=name, tenant=tenant, **how))
        self.waiting[name] = tenant
        self.served.setdefault(tenant, 0)

    def step(self):
        """Make a step. Return the tenants of whom somebody waited before it and after it."""
        before = set(self.waiting.values())
        step = self.scheduler.schedule()
        lens = step.plan.seq_lens[: len(step.handles)]
        for row, lane in enumerate(step.lanes.tolist()):
            request = self.scheduler.request_of(lane)
            if row < step.num_decodes:
                self.served[request.tenant] += 1
            elif request.id in self.waiting:
                del self.waiting[request.id]
                self.seen.add(request.id)
                self.served[request.tenant] += request.prompt.size - int(lens[row] - step.num_new[row])
        outputs = self.scheduler.update(step, np.full(len(step.sample_at), 7, np.int32))
        self.ended |= {output.id for output in outputs}
        return before & set(self.waiting.values())

    def most_ahead(self, weight):
        """The most that a tenant uses beyond the one whose turn it is: an admission, and what then decodes."""
        lead = self.options["max_step_tokens"] if self.options.get("overtake", 16) else 0
        return lead + (PROMPT + self.running * TOKENS) / weight


def shares(seed):
    """Serve a crowd, whose tenants come and go; return by how much the bound on their shares was missed, at worst."""
    rng = np.random.default_rng(seed)
    weights = dict(zip("abc", rng.choice([0.5, 1.0, 2.0, 4.0], 3).tolist(), strict=True))
    crowd = Crowd(rng, int(rng.integers(2, 6)), weights=weights, overtake=int(rng.choice([0, 4])))
    since, worst, steps = {}, 0.0, 0  # pair of tenants: the differences of what they got, while both wait
    away = str(rng.choice(list("abc")))  # comes late, when the others have got a lot
    while steps < 1200:
        for tenant in "abc":
            lines = list(crowd.waiting.values())
            if lines.count(tenant) < 3 and (tenant != away or steps > 500):
                crowd.add(tenant, priority=int(rng.integers(-1, 2)))
        both = crowd.step()
        steps += 1
        for one, other in ("ab", "ac", "bc"):
            seen = since.setdefault((one, other), [])
            if not {one, other} <= both:
                seen.clear()
                continue
            seen.append(crowd.served[one] / weights[one] - crowd.served[other] / weights[other])
            bound = crowd.most_ahead(weights[one]) + crowd.most_ahead(weights[other])
            worst = max(worst, (max(seen) - min(seen)) / bound)
    crowd.scheduler.check()
    return worst


def test_backlogged_tenants_get_tokens_by_weight():
    first = fresh_seed()
    worst = max(shares([first, number]) for number in range(4))
    assert 0.05 < worst <= 1, f"{worst:.2f} of what the bound allows"


def lonely(seed, wanted):
    """Flood a scheduler with what goes first, and one request that does not; return whether it ended by the bound."""
    rng = np.random.default_rng(seed)
    ageing, overtake, line = int(rng.integers(1, 4)), int(rng.integers(0, 4)), 4
    crowd = Crowd(rng, 6, ageing=ageing, overtake=overtake, weights={"big": 4.0})
    length = 2 * (crowd.pool.num_blocks - 1) - TOKENS  # it takes the whole pool
    victim = Request(range(9000, 9000 + length), TOKENS, tenant="small", id="victim")
    for _ in range(line):
        crowd.add("small")
    crowd.scheduler.add(victim)
    # Of its tenant, those go first that wait, and those that come until the others are no older.
    own = 2 * line + ageing * 2 + overtake + 1
    tokens = own * (PROMPT + TOKENS) * (1 + 4) + 5 * crowd.most_ahead(1)  # of both tenants, weights 1 and 4
    answers = tokens + crowd.running * TOKENS
    chunks = -(-(length + TOKENS) // 8)
    bound = int(answers + (tokens + crowd.running * answers) * chunks)
    for _ in range(min(bound, wanted)):
        for tenant in ("small", "big"):
            while list(crowd.waiting.values()).count(tenant) < line:
                crowd.add(tenant, prompt=4, priority=2)
        crowd.step()
        if "victim" in crowd.ended:
            return True
    return False


def test_request_that_all_others_would_pass_ends_in_a_bounded_time():
    first = fresh_seed()
    for number in range(6):
        assert lonely([first, number], wanted=10**9), f"number {number} starved"


def test_unfair_shares_are_detected():
    with mock.patch.object(WaitingQueue, "_least", lambda self: 0.0):
        assert max(shares(number) for number in range(4)) > 1


def test_starvation_is_detected():
    def make(weights, ageing, overtake):
        return WaitingQueue(weights, ageing, 2**40)

    with mock.patch("kvpool.scheduler.scheduler.WaitingQueue", make):
        assert not all(lonely(number, wanted=500) for number in range(6))
