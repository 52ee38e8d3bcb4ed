"""The twin finds nothing in the core, finds a planted fault, and tells how to see it again."""

import dataclasses
import random

import pytest

import kvpool
from kvpool import Group
from kvpool.testing import ModelPool
from tests.verify import run
from tests.verify.__main__ import main
from tests.verify.twin import WORDS_PER_RUN, Twin
from tests.verify.words import KINDS, WORDS, faces, shape_of

#: What may be wrong with an option of a pool, or right.
WRONG = (
    *({"lookahead": n} for n in (-1, 0, 1, 2, 5, True, None, 1.0)),
    *({"groups": groups} for groups in ([], 3, "full", [1], [None], (), [Group.state(2)], [Group.full()] * 9)),
    *({"prefix_cache": flag} for flag in (True, False, 1)),
    *({"reserved_blocks": n} for n in (0, 1, 5, 20)),
    *({"watermark": n} for n in (0, 3, 99)),
    *({"events": n} for n in (0, 4)),
    *({"num_blocks": n} for n in (0, 1, 2, 6)),
    *({"block_size": n} for n in (0, 1, 2, 3)),
)


class LookaheadForgotten(ModelPool):
    """A planted bug: windows and chunks let tokens go that a truncation may bring back."""

    def _let_go(self, seq, layer, p):
        super()._let_go(seq, layer, p + self.lookahead)


def planted(**options):
    """The model; of pools without a prefix cache, one that has a fault."""
    return (ModelPool if options["prefix_cache"] else LookaheadForgotten)(**options)


class Planted(Twin):
    make_model = staticmethod(planted)


@pytest.mark.parametrize("calls", [4_000, pytest.param(60_000, marks=pytest.mark.long)])
def test_core_does_what_the_model_does(calls):
    report = run.search(20_261_127, calls=calls, words=WORDS_PER_RUN, make_pool=Twin)
    again = f"python -m tests.verify --model --seed {report.seed} --ops 1"
    assert report.finding is None, f"{report.finding}\nagain: {again}"
    missed = set(WORDS) - {word for word, times in report.words.items() if times}
    assert missed <= {"reset"} and report.met["refused"] and report.met["hits"], missed


def tiny(seed, kinds):
    """A run of the fuzzer on a pool whose prefix cache has to let go soon."""
    r, shape = random.Random(f"tiny {seed}"), shape_of(seed)
    window = Group.window(r.randint(1, 3 * shape.pool["block_size"]))
    groups = [{"full": Group.full(), "window": window}[kind] for kind in kinds] or None
    pool = shape.pool | {
        "num_blocks": shape.pool["reserved_blocks"] + r.randint(4, 10) * max(1, len(kinds)),
        "max_blocks_per_seq": r.choice([4, 8]),
        **{"watermark": 0, "lookahead": 0, "prefix_cache": True, "groups": groups},
    }
    return dataclasses.replace(shape, pool=pool, texts=8, dice=faces(r, True, groups, ()))


@pytest.mark.parametrize("runs", [40, pytest.param(2_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kinds", [(), ("full", "full"), ("full", "window")], ids=["none", "two full", "window"])
def test_core_that_evicts_does_what_the_model_does(runs, kinds):
    """In hits, lengths, tables and counts; and rows read what they must."""
    evicting = 0
    for seed in range(runs):
        shape = tiny(seed, kinds)
        with Twin(**shape.pool) as pool:
            finding = run.whole(pool, shape, 60)
            evicting += pool.stats().evictions > 0
        assert finding is None, f"seed {seed}: {finding}"
    assert evicting > runs // 5, "few runs met an eviction"


def test_planted_fault_is_found_shrunk_and_printed_as_a_test():
    report = run.search(1, calls=20_000, words=WORDS_PER_RUN, make_pool=Planted)
    assert report.finding is not None and report.finding.startswith("model: "), report.finding
    shrunk = run.shrink(shape_of(report.seed), report.place, Planted)
    assert shrunk is not None and len(shrunk.words) <= 12, shrunk.words
    text = run.as_test(report.seed, (), shrunk, by_model=True)
    names = {}
    exec(text, names)
    names[f"test_verify_{report.seed}"]()  # the model does not have the fault
    assert run.play(shape_of(report.seed), shrunk.words, Planted)[0] == shrunk.finding


def test_command_compares_with_the_model_and_tells_how_to_make_a_finding_again(capfd, monkeypatch):
    assert main(["--model", "--ops", "300", "--seed", "3"]) == 0
    monkeypatch.setattr("tests.verify.__main__.Twin", Planted)
    assert main(["--model", "--ops", "20000", "--seed", "1"]) == 1
    said = capfd.readouterr().out
    assert "--ops 1 --model" in said and "words, Twin)" in said


def make_group(rng):
    """A group with options that may be wrong."""
    kind = rng.choice(KINDS)
    number = rng.choice([1, 2, 3, 5, 8, 1, 2, 3, 5, 8, 0, -1, True, 1.5, None])
    if kind == "state":
        return Group.state(number)
    options = {}
    for name, values in (
        ("block_size", [None, 2, 2, 4, 8, 1, 3, 6, 16, 0, -2, "2"]),
        ("columns", [1, 1, 2, 5, 0, -1, None]),
        ("arena", [0, 0, 0, 1, 1, 2, 7, 8, -1, None]),
        ("num_blocks", [None, None, 6, 6, 9, 1, 0, -1, 2.0]),
    ):
        if rng.random() < 0.35:
            options[name] = rng.choice(values)
    if kind == "full":
        return Group.full(**options)
    if kind == "chunk":
        return Group.chunk(number, **options)
    if rng.random() < 0.5:
        options["keep"] = rng.choice([0, 1, 2, 4, 5, 8, -1, None])
    return Group.window(number, **options)


def made(make_pool, options):
    """What a pool says of its arenas and options, or the type of what was raised."""
    try:
        pool = make_pool(**options)
    except Exception as error:  # the other side must raise it as well
        return type(error)
    groups = options["groups"] or [Group.full()]
    num_arenas = 1 + max(group.arena for group in groups) + sum(group.kind == "state" for group in groups)
    found = [tuple(pool.stats(arena)) for arena in range(num_arenas)], pool.options.groups, pool.options.lookahead
    pool.shutdown()
    return found


def test_core_makes_the_pools_that_the_model_makes():
    """Pools that may be wrong: both make one, or both raise the same."""
    rng, met = random.Random("constructors 1"), set()
    for _ in range(1_000):
        groups = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            try:
                groups.append(make_group(rng))
            except (TypeError, ValueError):
                continue
        options = {"num_blocks": 16, "block_size": 2, "groups": groups, "max_seqs": 4}
        if rng.random() < 0.4:  # one thing that is wrong, for which both sides have the same word
            options |= {"groups": [Group.full(), Group.window(4), Group.state(3)], **rng.choice(WRONG)}
        found, due = made(kvpool.Pool, options), made(ModelPool, options)
        assert found == due, f"Pool(**{options}): {found}, due {due}"
        met.add(due if isinstance(due, type) else "made")
    assert met == {"made", ValueError, TypeError}, met
