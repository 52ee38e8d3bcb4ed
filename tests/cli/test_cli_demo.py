"""`kvpool demo` decides its claims by measuring: a planted fault must turn claim and exit status."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import mlx.core as mx
import pytest

import kvpool
from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.cache import Batch, PagedKVCache
from kvpool.cli import demo, main
from kvpool_backends.cpu import CPUBackend

PARTS = [part.__name__ for part in demo.PARTS]
CLAIMS = ["step_same_tables", "step_cheaper", "out_of_blocks_raised", "state_unchanged", "goes_on", "forks_are_free"]
CLAIMS += ["forks_copy_the_tail", "forks_read_their_own", "prefix_found", "prefix_stored_once", "prefix_exact"]
CLAIMS += ["window_leaves", "groups_close", "tokens_llama", "leaks_llama", "tokens_gemma3", "leaks_gemma3"]
CLAIMS += ["samples_same", "samples_share", "samples_bytes"]


@pytest.fixture
def small(monkeypatch):
    """Parts of small sizes."""
    sizes = {"ROWS": 16, "CONTEXT": 1024, "ROUNDS": 3, "PROMPTS": (3, 40, 17), "NEW_TOKENS": 12}
    for name, value in (sizes | {"SAMPLES": 6, "SAMPLE_PROMPT": 40, "SAMPLE_TOKENS": 10}).items():
        monkeypatch.setattr(demo, name, value)


def facts_of(capsys, *argv: str) -> tuple[int, dict]:
    """The exit status and the JSON object of a run."""
    status = main(["demo", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)  # fails if anything else was printed


def test_demo_with_its_default_sizes_holds_in_time():
    """CPU time, of all threads: what neighbours take of the machine is not the demo's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "kvpool", "demo", "--json"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert list(result["claims"]) == CLAIMS and result["not_run"] == {}
    assert result["holds"] is True and all(claim["holds"] is True for claim in result["claims"].values())
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30  # a sixth of it is usual


@pytest.mark.parametrize("block_size", ["1", "8", "64"])
def test_demo_holds_with_any_size_of_blocks_and_prints_each_part(small, capsys, block_size):
    assert main(["demo", "--kv-block-size", block_size]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1].startswith(f"{len(CLAIMS)} of {len(CLAIMS)} claims hold, ") and err == ""
    assert sum(line.startswith("  ok ") for line in lines) == len(CLAIMS) == len(lines) - len(PARTS) - 1


@pytest.mark.parametrize("bad", ["0", "-1", "257"])
def test_demo_block_size_out_of_range_is_refused(capsys, bad):
    assert main(["demo", "--kv-block-size", bad]) == 2
    assert capsys.readouterr().err == f"kvpool demo: --kv-block-size {bad}: out of range, 1..256\n"


# ------------------------------------------------------------------------------------- planted faults


class BrokenPool(kvpool.Pool):
    """Cannot step."""

    def step(self, plan, handles, num_new=1, **options):
        raise RuntimeError("planted")


class ChangedPool(kvpool.Pool):
    """A step that is refused takes a block."""

    def step(self, plan, handles, num_new=1, **options):
        try:
            return super().step(plan, handles, num_new, **options)
        except kvpool.OutOfBlocks:
            self.blocks.alloc()
            raise


class CopyingPool(kvpool.Pool):
    """A fork takes blocks."""

    def fork(self, handle, n=1):
        self.blocks.alloc(n)
        return super().fork(handle, n)


class ForgetfulPool(kvpool.Pool):
    """Finds no prefix."""

    def open(self, tokens=None, **options):
        return super().open()


class LeakyPool(kvpool.Pool):
    """Loses a block with each sequence that ends."""

    def close(self, handles):
        self.blocks.alloc()
        return super().close(handles)


def keeps_all(window_size):
    return kvpool.Group.full()


def copies_nothing(self, plan):
    pass


def forgets_the_first_key(self, keys, values, fetch=PagedKVCache.update_and_fetch):
    if self.empty():
        keys = mx.concatenate([mx.zeros_like(keys[:, :, :1]), keys[:, :, 1:]], axis=2)
    return fetch(self, keys, values)


def keeps_its_forks(self, *args, fork=Batch.fork, kept=[], **options):  # noqa: B006
    kept.append(fork(self, *args, **options))  # their blocks never come back
    return kept[-1]


def off_by_one(self, names, num_new=1, step=demo.PlainAllocator.step):
    tables, lens, slots = step(self, names, num_new)
    return tables, lens, slots + 1


@pytest.mark.parametrize(
    ("part", "owner", "name", "fault", "broken"),
    [
        (demo.step_cost, demo.PlainAllocator, "step", off_by_one, {"step_same_tables"}),
        (demo.step_cost, demo, "MIN_RATIO", 1e9, {"step_cheaper"}),
        (demo.out_of_blocks, kvpool, "Pool", ChangedPool, {"state_unchanged", "goes_on"}),
        (demo.forks, kvpool, "Pool", CopyingPool, {"forks_are_free"}),
        (demo.forks, CPUBackend, "copy_blocks", copies_nothing, {"forks_read_their_own"}),
        (demo.prefix_hits, kvpool, "Pool", ForgetfulPool, {"prefix_found", "prefix_stored_once", "prefix_exact"}),
        (demo.groups, kvpool.Group, "window", keeps_all, {"window_leaves"}),
        (demo.groups, kvpool, "Pool", LeakyPool, {"groups_close"}),
        (demo.greedy_tokens, PagedKVCache, "update_and_fetch", forgets_the_first_key, {"tokens_llama"}),
        (demo.samples, PagedKVCache, "update_and_fetch", forgets_the_first_key, {"samples_same"}),
        (demo.greedy_tokens, Batch, "fork", keeps_its_forks, {"leaks_llama", "leaks_gemma3"}),
    ],
)
def test_fault_breaks_its_claim_and_the_verdict(small, monkeypatch, capsys, part, owner, name, fault, broken):
    monkeypatch.setattr(owner, name, fault)
    monkeypatch.setattr(demo, "PARTS", [part])
    status, result = facts_of(capsys)
    assert {name for name, claim in result["claims"].items() if not claim["holds"]} == broken
    assert result["not_run"] == {} and status == 1 and result["holds"] is False


def test_demo_part_that_raises_does_not_stop_the_others(small, monkeypatch, capsys):
    monkeypatch.setattr(kvpool, "Pool", BrokenPool)
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out.count("  -- stopped by RuntimeError: planted") == len(PARTS) and "Traceback" in err
    assert out.splitlines()[-1].startswith(f"0 of 0 claims hold, parts that did not run: {len(PARTS)}, ")


# ----------------------------------------------------------------------------------------- models


def test_demo_runs_on_a_checkpoint(small, tmp_path, capsys):
    tiny.write(tmp_path, tiny.CONFIG, *tiny.make())
    status, result = facts_of(capsys, "--model", str(tmp_path))
    assert status == 0 and result["not_run"] == {}
    assert result["claims"]["tokens_checkpoint"]["sentence"].startswith(f"checkpoint {tmp_path}")


@pytest.mark.parametrize(
    ("wrong", "said"), [(".", "a folder without config.json"), ("./no/model", "there is no such folder")]
)
def test_demo_of_a_model_that_is_not_there_is_refused_before_any_work(tmp_path, monkeypatch, capsys, wrong, said):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--model", wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvpool demo: --model {wrong}: {said}") and len(err.splitlines()) == 1


def test_without_mlx_its_parts_are_not_run_and_the_verdict_says_so(small, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    status, result = facts_of(capsys)
    assert status == 1 and result["holds"] is False and set(result["not_run"]) == {"greedy_tokens", "samples"}
    assert all("pip install 'kvpool[mlx]'" in reason for reason in result["not_run"].values())
    assert list(result["claims"]) == CLAIMS[:13]
