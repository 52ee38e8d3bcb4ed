"""`kvpool fuzz --target`: somebody else's allocator or backend, through its adapter."""

import json
import re
from pathlib import Path

import pytest
from seed_allocator import FAULTS, Adapter, sound

import kvpool
from kvpool.cli import main
from kvpool.testing import conformance
from kvpool.testing.fuzz_target import Checked, hunt_target

CALLS = 20_000


class Pool(kvpool.Pool):
    """A pool whose tables are lists."""

    def table_list(self, handle):
        return self.table(handle).tolist()


class OnPool:
    """kvpool itself behind the protocol, prefix cache included."""

    OutOfBlocks = kvpool.KVPoolError

    def __init__(self, num_blocks, block_size):
        self.pool = Pool(num_blocks, block_size, in_order=True, reserved_blocks=0, prefix_cache=True)
        self.plan = kvpool.Plan(self.pool, 1, 1 << 12)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.table, self.free = self.pool.table_list, self.pool.close

    @property
    def num_free(self):
        stats = self.pool.stats()
        return stats.free + stats.evictable

    def open(self, tokens):
        handle = self.pool.open(tokens)
        self.hits = self.pool.num_tokens(handle)
        self.pool.step(self.plan, [handle], len(tokens) - self.hits)
        self.pool.commit(handle, tokens[self.hits :])
        return handle

    def append(self, handle, tokens):
        self.pool.step(self.plan, [handle], len(tokens))
        return self.plan.copies.tolist()

    def truncate(self, handle, length):
        self.pool.truncate(handle, length)

    def fork(self, handle):
        return int(self.pool.fork(handle)[0])

    def cached(self, handle):
        return self.hits


def repaired_but(fault):
    return lambda num_blocks, block_size: Adapter(num_blocks, block_size, without=set(FAULTS) - {fault})


def test_seed_allocator_is_convicted():
    report = hunt_target(Adapter, calls=CALLS)
    assert report.finding is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_seed_allocator_is_found(fault):
    report = hunt_target(repaired_but(fault), calls=CALLS)
    assert report.kind == FAULTS[fault], report.finding
    assert report.script.count("checked.") <= 8, report.script


def test_repaired_seed_allocator_passes():
    report = hunt_target(sound, calls=CALLS)
    assert report.finding is None and report.calls >= CALLS


def test_kvpool_passes():
    report = hunt_target(OnPool, calls=5000)
    assert report.finding is None, report.script


def test_script_fails_on_the_allocator_that_made_it():
    report = hunt_target(Adapter, calls=CALLS, source="from seed_allocator import Adapter\nAdapter")
    space = {}
    exec(report.script, space)
    with pytest.raises(AssertionError):
        space["test_fuzz_target"]()
    space = {}
    exec(report.script.replace("Adapter(", "sound(").replace("import Adapter", "import sound"), space)
    space["test_fuzz_target"]()


def test_readme_shows_what_the_command_prints(capsys):
    page = Path(__file__).with_name("README.md").read_text()
    (command,) = re.findall(r"`kvpool (fuzz --target\s+seed_allocator:Adapter --seed \d+)` ends at once", page)
    assert main(command.split()) == 1
    printed = re.sub(r"in [\d.]+ s", "in 0.0 s", capsys.readouterr().out).strip()
    shown = "\n".join(f"    {line}".rstrip() for line in printed.splitlines())
    assert shown in re.sub(r"in [\d.]+ s", "in 0.0 s", page)


def test_a_missing_copy_is_a_finding():
    class Forgetful(OnPool):
        def append(self, handle, tokens):
            super().append(handle, tokens)
            return []

    assert hunt_target(Forgetful, calls=CALLS).kind == "content"


def test_checked_reads_what_it_wrote():
    checked = Checked(sound(4, 2))
    one = checked.open([1, 2, 3])
    other = checked.open([1, 2, 3])
    checked.append(one, [4])
    assert one.table[0] == other.table[0] and one.table[1] != other.table[1]
    checked.free(one)
    checked.free(other)


@pytest.mark.parametrize(("target", "status"), [("seed_allocator:Adapter", 1), ("seed_allocator:sound", 0)])
def test_command_drives_an_allocator(capsys, target, status):
    assert main(["fuzz", "--target", target, "--ops", "3000", "--json"]) == status
    facts = json.loads(capsys.readouterr().out)
    assert facts["target"] == target
    assert bool(facts["finding"]) == bool(status)
    assert ("def test_" in facts["script"]) == bool(status)


@pytest.fixture
def few_cases(monkeypatch):
    """The kit's whole list has tests of its own."""
    monkeypatch.setattr(conformance, "CASES", [conformance.protocol_is_implemented])


def test_command_drives_a_backend(capsys, few_cases):
    assert main(["fuzz", "--target", "kvpool_backends.numpy:NumpyBackend", "--ops", "20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cases"] == {"protocol_is_implemented": "passed"}
    assert facts["calls"] >= 20


def test_command_convicts_a_backend(capsys, few_cases):
    assert main(["fuzz", "--target", "seed_backend:Broken", "--ops", "2000", "--seed", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["finding"]
