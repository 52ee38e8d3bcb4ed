"""`PromptCache.insert(keep=...)`: what is kept stays while anything else is left, and takes nobody's room."""

import random
from itertools import pairwise

import pytest

pytest.importorskip("mlx.core")
programs = pytest.importorskip("prompt_programs")  # needs the package of the caches

from kvpool.adapters import prompt_cache as subject  # noqa: E402
from kvpool.adapters.prompt_cache import TYPES, PromptCache  # noqa: E402
from kvpool.adapters.prompt_store import store_layout  # noqa: E402
from kvpool.retention import Keep  # noqa: E402
from kvpool.store import MemoryStore  # noqa: E402

BUDGETS = {"dense": 20_000, "state": 20_000, "unknown": 1000}  # bytes: some prompts
WHOLE = {"dense": 0, "state": 30, "unknown": 500}  # bytes of caches that are kept whole
LIMITS = ("max_bytes", "max_size", "checkpoint_bytes")


class Cached:
    """A cache with a clock of its own, and what it may have: the tokens of each prompt, its priority and its end."""

    def __init__(self, kind, max_bytes=None, limit=None, max_size=None):
        self.kind, self.now, self.known, self.count = kind, 1000.0, {}, 0
        self.prompts = PromptCache(
            max_bytes or BUDGETS[kind],
            max_size=4 if limit == "max_size" else max_size,
            checkpoint_bytes=WHOLE[kind] if limit == "checkpoint_bytes" else None,
            clock=lambda: self.now,
        )

    def insert(self, name, length=50, keep=None, tokens=None, **options):
        """Insert a prompt, which begins like no other unless `tokens` say what it is."""
        self.count += 1
        tokens = tokens or [1000 + self.count, *range(length - 1)]
        self.known[name] = tokens, keep.priority if keep else 0, self.now + keep.ttl if keep else 0
        return self.prompts.insert(
            tokens, programs.made(self.kind, tokens, random.Random(length)), keep=keep, **options
        )

    def has(self, name):
        tokens = self.known[name][0]
        return self.prompts.fetch([*tokens, 77])[1] == len(tokens)

    def names(self):
        return [name for name in self.known if self.has(name)]

    def priority(self, name):
        return self.known[name][1] if self.now < self.known[name][2] else 0


def rule_of_before(order):
    """The sequence that leaves first where nothing is kept."""
    orders = [list(each) for each in order.values()]
    for each, following in pairwise(orders):
        if each and len(each) >= len(following):
            return each[0]
    return next(one for each in reversed(orders) for one in each)


each_kind = pytest.mark.parametrize("kind", BUDGETS)
each_limit = pytest.mark.parametrize("limit", LIMITS)


@each_kind
@each_limit
def test_kept_prompt_is_found_while_anything_of_a_lower_priority_is_left(kind, limit):
    draw, gone = random.Random(3), []
    one = Cached(kind, limit=limit)
    for number in range(150):
        keep = Keep(draw.randint(1, 3), draw.randint(1, 60)) if draw.random() < 0.7 else None
        before = one.names()
        one.insert(number, draw.randint(17, 80), keep, cache_type=draw.choice(TYPES))
        left = one.names()
        for name in set(before) - set(left):
            gone.append(one.priority(name))
            assert gone[-1] <= min((one.priority(other) for other in left if other != number), default=8)
        one.known = {name: one.known[name] for name in left}
        one.now += draw.choice([0, 1, 5])
        if draw.random() < 0.3 and left:
            one.has(draw.choice(left))
    assert set(gone) >= {0, 1}


@each_kind
@each_limit
def test_insertion_that_fits_in_an_empty_cache_fits_beside_what_is_kept(kind, limit):
    draw, one = random.Random(4), Cached(kind, limit=limit)
    for number in range(60):
        one.insert(number, draw.randint(1, 60), Keep(draw.randint(1, 7), 100))
        empty, tokens = Cached(kind, limit=limit), [number + 100] * draw.randint(1, 150)
        assert one.insert("new", tokens=tokens) == empty.insert("new", tokens=tokens)
        assert one.has("new") == empty.has("new")
        assert programs.held_nbytes(one.prompts) == one.prompts.nbytes <= one.prompts.max_bytes


@each_kind
@each_limit
def test_prompts_that_are_kept_no_longer_leave_as_those_that_never_were(kind, limit, monkeypatch):
    """Each leaves whole, by the rule that there was without directives."""
    oldest, drop, told, dropped = subject.oldest, PromptCache._drop, [], []

    def watched(order, *arguments):
        told.append((oldest(order, *arguments), rule_of_before(order)))
        return told[-1][0]

    monkeypatch.setattr(subject, "oldest", watched)
    monkeypatch.setattr(PromptCache, "_drop", lambda prompts, one: dropped.append(one) or drop(prompts, one))
    draw, never, once = random.Random(5), Cached(kind, limit=limit), Cached(kind, limit=limit)
    for number in range(150):
        given = {"cache_type": draw.choice(TYPES), "length": draw.randint(1, 80)}
        keep = None if limit == "max_size" else Keep(draw.randint(1, 7), 3)  # a new one may have to go at once
        assert never.insert(number, **given) == once.insert(number, keep=keep, **given)
        once.now += 3
        names = list(never.known)
        draw.shuffle(names)
        assert [never.has(name) for name in names] == [once.has(name) for name in names]
    assert all(one is other and one in dropped for one, other in told) and (told or limit == "checkpoint_bytes")


def test_same_tokens_stay_kept_and_a_longer_prompt_leaves_before_its_kept_beginning():
    for kind in BUDGETS:
        one = Cached(kind, 1 << 20)
        one.insert("first", 40, Keep(3, 100))
        same = one.known["first"][0]
        one.insert("again", tokens=same)
        one.insert("more", tokens=[*same, *range(50)])
        assert len(one.prompts) == 2
        one.insert("other")
        one.prompts.trim_to(n_sequences=1)
        assert one.names() == ["first", "again"], kind


def test_turn_that_is_kept_as_long_takes_the_place_of_the_turn_before():
    one = Cached("dense", 1 << 20)
    for count, keep, sequences in ((40, Keep(3, 9), 1), (50, Keep(3, 9), 1), (60, Keep(2, 9), 2), (70, Keep(4, 8), 3)):
        one.insert(count, tokens=list(range(count)), keep=keep)
        assert len(one.prompts) == sequences
    one.now += 9
    one.insert(80, tokens=list(range(80)))
    assert len(one.prompts) == 1


@pytest.mark.parametrize(
    ("kind", "places", "tokens", "found"),
    [
        ("dense", [], 64, 64),  # in whole blocks, where all caches have rows
        ("dense", [], 70, 64),
        ("dense", [], 15, 0),
        ("state", [], 70, 0),  # nobody can find less than 150
        ("state", [48, 67, 90], 66, 48),
        ("state", [48, 67, 90], 67, 67),
        ("state", [48, 67, 90], 70, 67),
        ("state", [48], 150, 150),
        ("window", [20, 48, 90], 70, 48),
        ("window", [20, 90], 70, 16),  # the window had not turned at 20 tokens, so it has rows
        ("window", [20], 15, 0),
        ("unknown", [48, 90], 70, 48),
    ],
)
def test_beginning_is_kept_as_far_as_a_prompt_that_begins_so_can_find_it(kind, places, tokens, found):
    one, long = Cached(kind, 1 << 20), list(range(150))
    for place in places:
        one.insert(place, tokens=long[:place])
    one.insert("long", tokens=long, keep=Keep(2, 10, tokens))
    assert one.has("long")
    one.insert("other")
    one.prompts.trim_to(n_sequences=1)
    assert one.prompts.fetch([*long[:tokens], 77])[1] == found
    assert one.has("other") != bool(found)
    one.now += 10
    one.insert("other")
    one.prompts.trim_to(n_sequences=1)
    assert one.names()[-1:] == ["other"] and one.prompts.fetch([*long[:tokens], 77])[1] == 0


@each_kind
def test_kept_prompt_that_is_taken_stays(kind):
    one = Cached(kind, 1 << 20)
    one.insert("kept", keep=Keep(1, 10))
    for is_kept in (True, False):
        assert one.prompts.fetch([*one.known["kept"][0], 77], take=True)[1] == 50
        assert len(one.prompts) == is_kept
        one.now += 10


def test_the_longest_end_is_taken_beside_a_kept_beginning():
    one = Cached("dense", 1 << 20)
    one.insert("kept", 48, Keep(1, 10))
    one.insert("more", tokens=[*one.known["kept"][0], 1, 2])
    assert len(one.prompts) == 2
    assert one.prompts.fetch([*one.known["more"][0], 77], take=True)[1] == 50
    assert len(one.prompts) == 1 and one.names() == ["kept"]


def test_store_has_no_directives():
    store = MemoryStore(store_layout(programs.made("dense", [1], random.Random(1)), "w"), 1 << 20)
    PromptCache(store=store).insert(
        range(32), programs.made("dense", list(range(32)), random.Random(1)), keep=Keep(7, 99)
    )
    prompts = PromptCache(store=store, max_size=1)
    assert prompts.fetch(range(33))[1] == 32
    prompts.insert([5], programs.made("dense", [5], random.Random(1)))
    assert prompts.fetch(range(33), load=False)[1] == 0


@pytest.mark.parametrize("wrong", [3, (1, 2), "high"])
def test_directive_that_is_none_is_refused_and_nothing_changes(wrong):
    one = Cached("dense")
    with pytest.raises(TypeError, match=r"\[insert\] keep must be a Keep, not "):
        one.prompts.insert(range(20), programs.made("dense", list(range(20)), random.Random(1)), keep=wrong)
    assert (len(one.prompts), one.prompts.nbytes, one.prompts._coming) == (0, 0, [])
    with pytest.raises(TypeError, match=r"\[PromptCache\] clock must be callable, not float"):
        PromptCache(clock=1.5)
