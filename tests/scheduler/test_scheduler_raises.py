"""What raises in the middle of a call: the state is whole, nothing is lost, and all go on.

A trace function raises at the lines of an admission, and where a step is made, as a signal would. Each function that a
user gives raises at each of its calls. What a run gives without either is what is right.
"""

import gc
import sys
import weakref
from collections import defaultdict
from functools import cache, partial
from operator import attrgetter
from traceback import walk_tb

import numpy as np
import pytest

from kvpool import Group, KVSpec, Pool, Request, Scheduler
from kvpool.eviction import H2O, Evictor
from kvpool.scheduler import policy
from kvpool_backends.numpy import NumpyBackend

TRACED = ("/kvpool/scheduler/", "/kvpool/eviction/")
BUILD = Scheduler._build.__code__
OVER = policy.__file__, max(line for *_, line in policy.admit_next.__code__.co_lines() if line)


class Tier:
    """Keeps how many blocks a sequence had."""

    def spill_to_host(self, handle, blocks):
        return len(blocks)

    def prefetch(self, kept, handle, blocks):
        assert kept == len(blocks)


def prompts(*lengths, shared=4):
    """Return prompts that begin alike, and have so many tokens of their own."""
    return [[*range(1, shared + 1), *range(100 * at, 100 * at + length)] for at, length in enumerate(lengths)]


def crowd(in_order=False, n=3, **options):
    """Hits, pins, two tenants, samples, overtaking and preemption, in a pool that is too small."""
    how = {"watermark": 0, "prefill_chunk": 5, "weights": {"a": 2.0, "b": 1.0}, "max_running": 3} | options
    pool = Pool(14, 2, prefix_cache=True, in_order=in_order, seed=1)
    requests = [
        Request(prompt, 8, id=at, tenant="ab"[at % 2], n=n if at == 2 else 1, deadline=1e9)
        for at, prompt in enumerate(prompts(3, 9, 2, 7, 1))
    ]
    return pool, Scheduler(pool, **how), requests


def grouped():
    """Promises instead of blocks, windows, states and their checkpoints."""
    kinds = [Group.full(), Group.window(4), Group.state(slots=6, blocks=2)]
    pool = Pool(22, 2, groups=kinds, prefix_cache=True, seed=1)
    requests = [Request(prompt, 5, id=at) for at, prompt in enumerate(prompts(3, 7, 2, shared=8))]
    return pool, Scheduler(pool, max_running=2, watermark=0, prefill_chunk=4), requests


def beams():
    """Beams that are preempted and come back with several hypotheses."""
    pool = Pool(20, 2, prefix_cache=True, seed=1)
    requests = [Request(prompt, 7, id=at, beam_width=3, n=2) for at, prompt in enumerate(prompts(3, 2, 4))]
    return pool, Scheduler(pool, max_running=6, watermark=0, prefill_chunk=3), requests


def evicting(**options):
    """Prompts that are longer than the budget, whose blocks are reserved behind the hit."""
    pool = Pool(24, 2, prefix_cache=True, seed=1)
    backend = NumpyBackend(KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32"), 24)
    evictor = Evictor(H2O(max_kv=8, sink=2, slack=2), pool, backend)
    requests = [Request(prompt, 6, id=at) for at, prompt in enumerate(prompts(9, 3, 12))]
    return pool, Scheduler(pool, max_running=2, watermark=0, prefill_chunk=3, eviction=evictor, **options), requests


SCENES = {
    "crowd": crowd,
    "in order": partial(crowd, in_order=True, mixed=False),
    "two steps out": partial(crowd, plans=2),
    "grouped": grouped,
    "beams": beams,
    "tier": partial(crowd, n=1, tier=Tier()),
    "evicting": evicting,
}


class Injected(Exception):
    """Raised by the tests alone."""


class Lines:
    """A trace function that notes the lines of admissions and of steps that are made, and raises at one of them."""

    def __init__(self, at=-1, error=Injected):
        self.at, self.error = at, error
        self.lines, self.inside = [], None

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def __call__(self, frame, event, arg):
        if self.inside is None and frame.f_code in (policy.admit_next.__code__, BUILD):
            self.inside = frame
        is_traced = self.inside is not None and any(part in frame.f_code.co_filename for part in TRACED)
        return self._line if is_traced else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.at + 1:
                raise self.error(self.lines[-1])
        elif event == "return" and frame is self.inside:
            self.inside = None
        return self._line


class Run:
    """A scene that is run to its end. What raises in a call is kept, and the call is made again."""

    def __init__(self, scene):
        self.pool, self.scheduler, self.requests = scene()
        self.out, self.outputs, self.raised = [], {}, []

    def call(self, function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except (Injected, KeyboardInterrupt) as error:
            self.raised.append(error)
            self.check()
        return function(*arguments, **options)

    def check(self):
        self.scheduler.check()
        stats = self.pool.stats()
        assert stats.sequences == len(self.scheduler.handles), "a sequence of the pool is lost"
        assert stats.pending == (0 if self.pool.options.in_order else len(self.out)), "a plan is lost"

    def add(self):
        for request in self.requests:
            self.call(self.scheduler.add, request)
        return self

    def schedule(self):
        step = self.call(self.scheduler.schedule)
        if step is not None:
            self.out.append(step)

    def update(self):
        step = self.out[0]
        tokens, beams = sample(step)
        outputs = self.call(self.scheduler.update, step, tokens, beams=beams)
        del self.out[0]
        self.outputs |= {(one.id, one.index): (one.tokens.tolist(), one.finish_reason) for one in outputs}

    def to_the_end(self, ahead=False):
        self.schedule()
        while self.out:
            if ahead:
                self.schedule()
            self.update()
            if not self.out:
                self.schedule()
        self.check()
        assert self.pool.stats().used == 0
        return self


def sample(step):
    """Return tokens that depend on the request and on how many it has, and continuations of beams."""
    keys = zip([one.id for one in step.requests], step.sample_index, step.sample_position, strict=True)
    tokens = np.array([hash(tuple(map(int, key))) % 50 for key in keys], np.int32)
    seeds = [[one.id, *step.generated(at)] for at, one in enumerate(step.requests) if one.beam_width]
    if not seeds:
        return tokens, None
    scores = np.array([np.random.default_rng(seed).normal(size=8) - 3 for seed in seeds], np.float32)
    return tokens, (np.tile(np.arange(8, dtype=np.int32), (len(seeds), 1)), scores)


counted = attrgetter(
    *("admissions", "preemptions", "setbacks", "hit_tokens", "again_hit_tokens", "next_admission", "chunks_allowed")
)


@cache
def undisturbed(name):
    """A run of a scene in which nothing raises, and the places of each line in its trace."""
    ahead, where = name == "two steps out", defaultdict(list)
    Run(SCENES[name]).add().to_the_end(ahead)  # some lines are run in the first run of a process alone
    whole = Run(SCENES[name]).add()
    with Lines() as seen:
        whole.to_the_end(ahead)
    for at, line in enumerate(seen.lines):
        where[line].append(at)
    assert len(where) > 150, "the trace saw no admissions"
    return whole, where


@pytest.mark.parametrize(
    ("name", "others"),  # the lines of another scene are left out in short tests
    [
        ("crowd", ()),
        *((name, ("crowd",)) for name in ("grouped", "beams", "tier", "evicting")),
        *(pytest.param(name, (), marks=pytest.mark.long) for name in SCENES if name != "crowd"),
    ],
)
def test_exception_at_any_line_of_an_admission_loses_nothing(name, others):
    whole, where = undisturbed(name)
    known = {line for other in others for line in undisturbed(other)[1]}
    for number, line in enumerate(line for line in where if line not in known):
        error, ats = KeyboardInterrupt if number % 2 else Injected, where[line]
        hurt = Run(SCENES[name]).add()
        with Lines(ats[number % len(ats)], error):
            hurt.to_the_end(ahead=name == "two steps out")
        assert [type(one) for one in hurt.raised] == [error]
        assert hurt.outputs == whole.outputs, hurt.raised
        is_built = any(frame.f_code is BUILD for frame, _ in walk_tb(hurt.raised[0].__traceback__))
        if line != OVER and not is_built:  # an admission that is over stays, and the call that is repeated may differ
            assert counted(hurt.scheduler._core) == counted(whole.scheduler._core)


def test_request_that_has_ended_is_not_kept_alive():
    class User:
        pass

    scheduler = Scheduler(Pool(64, 4))
    user = User()
    scheduler.add(Request(range(20), max_tokens=1, user=user))
    kept, user = weakref.ref(user), None
    step = scheduler.schedule()
    scheduler.update(step, np.zeros(1, np.int32))
    assert scheduler.schedule() is None
    del step
    gc.collect()
    assert kept() is None


class Hook:
    """Calls a function, and raises at one of the calls."""

    def __init__(self, function):
        self.function, self.calls, self.at = function, 0, -1

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == self.at:
            raise Injected(self.at)
        return self.function(*arguments)


def hooked(owner, name):
    hook = Hook(getattr(owner, name))
    object.__setattr__(owner, name, hook)  # policies are frozen
    return hook


def with_option(name, function):
    hook = Hook(function)
    return hook, crowd(**{name: hook})


def with_tier(name):
    tier = Tier()
    hook = hooked(tier, name)
    return hook, crowd(n=1, tier=tier)


def with_evictor(part, name):
    pool, scheduler, requests = evicting()
    evictor = scheduler._core.eviction
    return hooked(getattr(evictor, part), name), (pool, scheduler, requests)


GIVEN = {
    "clock": lambda: with_option("clock", iter(range(10**6)).__next__),
    "pad_to": lambda: with_option("pad_to", lambda rows, tokens: (rows, tokens)),
    "speculate": lambda: with_option("speculate", lambda rows: [one.generated[-1:] for one in rows]),
    "spill_to_host": partial(with_tier, "spill_to_host"),
    "prefetch": partial(with_tier, "prefetch"),
    "copy_blocks": partial(with_evictor, "backend", "copy_blocks"),
    "compact": partial(with_evictor, "backend", "compact"),
    "lens_after": partial(with_evictor, "policy", "lens_after"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_function_that_raises_loses_nothing(name):
    hook, scene = GIVEN[name]()
    whole = Run(lambda: scene).add().to_the_end()
    assert hook.calls > 0
    for at in range(1, hook.calls + 1):
        hurt_hook, hurt_scene = GIVEN[name]()
        hurt_hook.at = at
        hurt = Run(lambda scene=hurt_scene: scene).add().to_the_end()
        assert len(hurt.raised) == 1
        assert hurt.outputs == whole.outputs, at
