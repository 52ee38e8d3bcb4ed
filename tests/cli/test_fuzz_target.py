"""`kvpool fuzz`: the installed core beside its plain model, and somebody else's allocator or backend."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from seed_allocator import FAULTS, Adapter, sound

import kvpool
from kvpool.cli import main
from kvpool.cli.fuzz import load_target
from kvpool.testing import ModelPool, conformance
from kvpool.testing.fuzz_target import PoolAllocator, fuzz_backend, fuzz_target
from kvpool_backends.numpy import NumpyBackend

CALLS = 20_000


def repaired_but(fault):
    return lambda num_blocks, block_size: Adapter(num_blocks, block_size, without=set(FAULTS) - {fault})


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_seed_allocator_is_found(fault):
    report = fuzz_target(repaired_but(fault), calls=CALLS)
    assert report.kind == FAULTS[fault], report.finding
    assert report.script.count("checked.") <= 8, report.script


def test_command_of_the_page_finds_the_first_fault(capsys):
    page = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    (command,) = re.findall(r"`kvpool (fuzz --target seed_allocator:Adapter\s+--seed\s+\d+)`", page)
    assert main(command.split()) == 1
    printed = capsys.readouterr().out
    assert "FINDING: content: a sequence of" in printed and printed.count("checked.open(") == 2


@pytest.fixture
def few_cases(monkeypatch):
    """The kit's whole list has tests of its own."""
    monkeypatch.setattr(conformance, "CASES", [conformance.protocol_is_implemented])


def test_command_detects_a_broken_backend(capsys, few_cases):
    assert main(["fuzz", "--target", "seed_backend:Broken", "--ops", "2000", "--seed", "1", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert "is wrong" in facts["finding"] and 0 < facts["calls"] <= 2000
    assert_repeats(capsys, facts)


def assert_repeats(capsys, facts):
    """The command that is printed makes the same finding in one run; the script makes it without the command."""
    command, _, version = facts["again"].partition("  # ")
    assert version == f"kvpool {kvpool.__version__}"
    assert main([*command.split()[1:], "--json"]) == 1
    again = json.loads(capsys.readouterr().out)
    assert (again["finding"], again["script"]) == (facts["finding"], facts["script"])
    assert again["runs"] <= 1
    space = {}
    exec(facts["script"], space)
    (test,) = (what for name, what in space.items() if name.startswith("test_"))
    with pytest.raises((AssertionError, IndexError)) as raised:
        test()
    assert str(raised.value) in facts["finding"]


# ---- what the target raises or returns ---------------------------------------------------------------------


class InNumpy:
    """A sound allocator; tables, counts and copies as NumPy has them."""

    max_new = 1

    def __init__(self, num_blocks, block_size):
        self.mine = sound(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.open, self.free = self.mine.open, self.mine.free

    @property
    def num_free(self):
        return np.int64(self.mine.num_free)

    def table(self, seq):
        return np.array(self.mine.table(seq), np.int32)

    def append(self, seq, tokens):
        before = list(self.mine.table(seq))
        self.mine.append(seq, tokens)
        pairs = zip(before, self.mine.table(seq), strict=False)
        return np.array([(old, new, self.block_size) for old, new in pairs if old != new], np.int32).reshape(-1, 3)


class RaisesInNumFree(InNumpy):
    """From its third question on."""

    asked = 0

    @property
    def num_free(self):
        self.asked += 1
        if self.asked > 3:
            raise IndexError("out of range")
        return super().num_free


class RefusesOddSizes(InNumpy):
    def __init__(self, num_blocks, block_size):
        if block_size % 2:
            raise TypeError(f"block_size {block_size} is odd:\nnone of ours")
        super().__init__(num_blocks, block_size)


class RaisesInCopies(NumpyBackend):
    """Only copies raise, and only those of a step."""

    def copy_blocks(self, plan):
        if plan.copies.size:
            raise IndexError("copies are out of range")


class Asserts(NumpyBackend):
    """Says nothing about what is wrong."""

    def copy_blocks(self, plan):
        if plan.copies.size:
            raise AssertionError


def any_allocator(*args, **options):
    return sound(*args, **options)


def any_backend(*args, **options):
    return NumpyBackend(*args, **options)


def backend_by_other_names(s, n):
    return NumpyBackend(s, n)


def no_allocator(num_blocks, block_size):
    return [num_blocks, block_size]


def sound_by_other_names(n, b):
    return sound(n, b)


def unsized_by_other_names(n, b):
    return object()


HERE = __name__


def test_sound_allocator_has_no_finding_also_with_integers_of_numpy():
    report = fuzz_target(InNumpy, calls=CALLS)
    assert report.finding is None and report.calls >= CALLS, report.script


@pytest.mark.parametrize(
    ("factory", "what"),
    [
        ("RaisesInNumFree", "num_free raised IndexError"),
        ("RefusesOddSizes", "the factory raised TypeError: block_size"),
    ],
)
def test_exception_of_an_allocator_is_a_finding(capsys, factory, what):
    assert main(["fuzz", "--target", f"{HERE}:{factory}", "--ops", "2000", "--seed", "1", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "exception" and what in facts["finding"]
    assert facts["script"].count("checked.") <= 2, facts["script"]
    compile(facts["script"], "", "exec")
    assert main([*facts["again"].partition("  # ")[0].split()[1:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["script"] == facts["script"]


def test_command_that_repeats_has_the_sizes(capsys):
    argv = ["--blocks", "4", "--block-size", "3"]
    assert main(["fuzz", "--target", "seed_allocator:Adapter", "--ops", "1e5", "--seed", "2", *argv, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert " ".join(argv) in facts["again"] and "Adapter(num_blocks=4, block_size=3)" in facts["script"]
    assert_repeats(capsys, facts)


@pytest.mark.parametrize(
    ("factory", "sizes", "finding"),
    [
        ("RaisesInCopies", [], "exception: IndexError: copies are out of range"),
        ("RaisesInCopies", ["--blocks", "9", "--block-size", "4"], "exception: IndexError: copies are out of range"),
        ("Asserts", [], "an assert without a message failed"),
    ],
)
def test_exception_of_a_backend_is_a_finding(capsys, few_cases, factory, sizes, finding):
    argv = ["fuzz", "--target", f"{HERE}:{factory}", "--ops", "2000", "--seed", "3", *sizes, "--json"]
    assert main(argv) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["finding"] == finding and facts["script_fails"]
    assert facts["calls"] > 0 and " ".join(sizes) in facts["again"]
    turns = re.search(r"play\(\[([\d, ]*)\]\)", facts["script"])[1].split(", ")
    assert len(turns) <= 5, facts["script"]
    assert_repeats(capsys, facts)


def test_backend_that_fails_once_is_a_finding_and_its_script_is_said_to_pass(capsys, monkeypatch, few_cases):
    written = itertools.count()

    class FailsOnce(NumpyBackend):
        def write(self, *args):
            if next(written) == 50:
                raise IndexError("once")
            super().write(*args)

    report = fuzz_backend(FailsOnce, 1, calls=200)
    assert (report.finding, report.script_fails) == ("exception: IndexError: once", False)
    assert f".play({list(range(20))})" in report.script, "the whole run"
    written = itertools.count()
    monkeypatch.setitem(globals(), "FailsOnce", FailsOnce)
    assert main(["fuzz", "--target", f"{HERE}:FailsOnce", "--ops", "200", "--seed", "1"]) == 1
    assert "fails only sometimes: the script below may pass" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["any_allocator", "any_backend", "backend_by_other_names"])
def test_factory_that_takes_anything_is_judged_by_what_it_makes(capsys, few_cases, target):
    assert main(["fuzz", "--target", f"{HERE}:{target}", "--ops", "20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["target"] == f"{HERE}:{target}" and facts["calls"] >= 20 and facts["script"] == ""
    assert facts.get("cases") == ({"protocol_is_implemented": "passed"} if "backend" in target else None)


def backend_never_made(spec, num_blocks):
    """Is a backend by its names."""
    raise IndexError("no backend today")


def test_backend_by_its_names_that_raises_is_a_finding(capsys):
    assert main(["fuzz", "--target", f"{HERE}:backend_never_made", "--ops", "20"]) == 1
    assert "IndexError: no backend today" in capsys.readouterr().out


@pytest.mark.parametrize("times", [1, 100])
def test_case_that_a_backend_fails_is_a_finding_and_its_script_fails_unless_it_was_once(few_cases, times):
    left = [times]

    def a_case_that_fails(factory):
        left[0] -= 1
        if left[0] >= 0:
            raise ValueError("not right")

    conformance.CASES.append(a_case_that_fails)
    report = fuzz_backend(NumpyBackend, 1, calls=20)
    assert report.finding.startswith("1 of 2 cases of the conformance kit failed\n- a_case_that_fails: ValueError")
    assert "a_case_that_fails(factory)" in report.script and report.script_fails == (times > 1)


def test_interrupt_is_no_finding():
    def factory(spec, num_blocks):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fuzz_backend(factory, 1, calls=20)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["seed_allocator:FAULTS"], "cannot be called"),
        (["seed_allocator:SeedAllocator.take"], "takes neither"),
        (["collections:UserDict"], "it lacks num_blocks, block_size, num_free, open, append, table, free"),
        (["builtins:dict"], "(spec, num_blocks) made no backend: TypeError: dict expected"),
        (["kvpool:Pool"], "it lacks num_free, append, free"),
        ([f"{HERE}:sound_by_other_names"], "parameters named num_blocks and block_size"),
        ([f"{HERE}:unsized_by_other_names"], "parameters named num_blocks and block_size"),
        ([f"{HERE}:no_allocator"], "it lacks num_blocks, block_size, num_free, open, table, free"),
    ],
)
def test_fuzz_target_of_a_wrong_kind_is_refused(capsys, more, what):
    assert main(["fuzz", "--ops", "10", "--target", *more]) == 2
    assert what in capsys.readouterr().err


def test_target_whose_module_goes_to_another_directory_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "goes_away.py").write_text("import os\nos.chdir('/')\nmake = dict\n")
    monkeypatch.chdir(tmp_path)
    assert load_target("goes_away:make") is dict


# ---- the installed core --------------------------------------------------------------------------------------


class LosesCopies(PoolAllocator):
    """A planted bug: copies are not told."""

    def append(self, seq, tokens):
        return super().append(seq, tokens)[:0]


def test_installed_core_has_no_finding_and_every_part_of_it_is_used():
    made = []

    class Kept(PoolAllocator):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            made.append(self)

    report = fuzz_target(Kept, 1, calls=20_000)
    assert report.finding is None, report.script
    pools = [one.pool for one in made]
    assert sum(pool.prefix.stats().hit_tokens for pool in pools) > 1_000
    assert all(sum(getattr(pool.stats(), name) for pool in pools) > 100 for name in ("cow_copies", "evictions"))


def test_finding_is_printed_as_a_test_and_can_be_made_again(capsys, monkeypatch):
    monkeypatch.setattr("kvpool.testing.fuzz_target.PoolAllocator", LosesCopies)
    assert main(["fuzz", "--ops", "1e5", "--seed", "4", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "content" and facts["script_fails"] and "--target" not in facts["again"]
    assert facts["script"].count("checked.") < 8, "it was not shrunk"
    assert_repeats(capsys, facts)
    monkeypatch.undo()
    space = {}
    exec(facts["script"], space)
    space["test_fuzz_target"]()


class FindsLess(ModelPool):
    """A planted bug of the model: half of a hit is not found."""

    def open(self, tokens=0, *given, **options):
        return super().open(tokens if isinstance(tokens, int) else [*tokens[: len(tokens) // 2], 99], *given, **options)


def test_pool_and_model_that_disagree_are_a_finding(monkeypatch):
    monkeypatch.setattr("kvpool.testing.fuzz_target.ModelPool", FindsLess)
    report = fuzz_target(PoolAllocator, 1, calls=20_000)
    assert report.kind == "model" and "the plain model" in report.finding and report.script_fails


@pytest.mark.parametrize(
    "argv",
    [
        *("--seconds soon", "--seconds -1", "--ops many", "--ops inf", "--ops 0", "--blocks 3", "--block-size 0"),
        *("--seed x", "--target nowhere", "--target kvpool:nothing", "--target no_such_module:f"),
    ],
)
def test_nonsense_is_refused(capsys, argv):
    assert main(["fuzz", *argv.split()]) == 2
    assert f"kvpool fuzz: {argv}: " in capsys.readouterr().err
