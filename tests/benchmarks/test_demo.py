"""The demo decides its claims by measuring: a planted fault must turn claim and exit status."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from rich.console import Console

import benchmarks.demo
import kvpool
from benchmarks.command import main as run_command
from benchmarks.demo import __main__ as command
from benchmarks.demo import models, occupancy, restart
from benchmarks.demo.settings import AllSettings
from benchmarks.picture import BLOCKS, INK, OTHER, OTHER_LIGHT
from kvpool.adapters.mlx_lm import passes, tiny
from kvpool.adapters.mlx_lm.cache import Batch, PagedKVCache
from kvpool.cli import demo, main
from kvpool.cli.demo import pools
from kvpool.cli.demo.models import ENGINE
from kvpool.cli.demo.report import Claim, Outcome, Part, Printer, Report
from kvpool.eviction import H2O, Memory

CORE_PARTS = [pools.STEP_COST, occupancy.PART, pools.OUT_OF_BLOCKS]


@dataclass(frozen=True)
class SmallSettings(AllSettings):
    prompt_lengths: tuple[int, ...] = (3, 40, 17)
    new_tokens: int = 12
    samples: int = 6
    sample_prompt: int = 40
    sample_tokens: int = 10
    shared_requests: int = 5
    batch_sizes: tuple[int, ...] = (16,)
    context: int = 1024
    rounds: int = 3
    requests: int = 30
    pool_blocks: int = 128
    max_len: int = 512
    talk_tokens: int = 60
    talk_budget: int = 32


@pytest.fixture
def settings(tmp_path) -> AllSettings:
    return SmallSettings(out=tmp_path / "demo.png")


@pytest.fixture
def small_demo(monkeypatch):
    """The demo of small sizes, without the part that starts servers."""
    parts = [part for part in command.all_parts() if part is not restart.PART]
    monkeypatch.setattr(command, "AllSettings", SmallSettings)
    monkeypatch.setattr(command, "all_parts", lambda: parts)


def run_demo(*argv: str) -> int:
    return run_command(command, argv)


def broken_claims(report: Report) -> set[str]:
    return {name for name, held in report.claims.items() if not held}


# ------------------------------------------------------------------------------------- the whole command


def test_demo_with_its_default_sizes_is_one_object_of_every_promise_and_holds_in_time(tmp_path):
    """CPU time, of all threads: what neighbours take of the machine is not the demo's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = [sys.executable, "-m", "benchmarks.demo", "--json", "--out", str(tmp_path / "p.png")]
    done = subprocess.run(whole, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)  # fails if anything else was printed
    assert list(result["claims"]) == [name for part in command.all_parts() for name in part.promises]
    assert list(result["numbers"]) == [part.name for part in command.all_parts()]
    assert all(value is True for value in result["claims"].values()), done.stderr
    assert result["held"] is True and result["not_run"] == {}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 90  # a third of it is usual


def test_block_size_of_the_command_line_reaches_every_part(monkeypatch, capsys):
    seen = []
    part = Part("seen", "", {}, lambda settings, say: seen.append(settings.block_size) or Outcome({}, {}))
    monkeypatch.setattr(command, "all_parts", lambda: [part])
    monkeypatch.setattr(demo, "all_parts", lambda: [part])
    assert run_demo("--json", "--kv-block-size", "8") == main(["demo", "--json", "--kv-block-size", "8"]) == 0
    assert seen == [8, 8]
    for bad in ("0", "-1", "257"):
        assert main(["demo", "--json", "--kv-block-size", bad]) == 2
        assert f"--kv-block-size {bad}: out of range, 1..256" in capsys.readouterr().err


def test_demo_text_ends_with_the_verdict_and_is_quiet_on_stderr(small_demo, tmp_path, capsys):
    assert run_demo("--out", str(tmp_path / "p.png")) == 0
    out, err = capsys.readouterr()
    count = sum(len(part.promises) for part in command.all_parts())
    assert out.splitlines()[-1].startswith(f"{count} of {count} claims held")
    claims = [line for line in out.splitlines() if "✓" in line]
    assert len(claims) == count and max(map(len, claims)) <= 80
    assert str(tmp_path / "p.png") in out.replace("\n", "")
    assert err == ""  # no terminal, no progress line


# ------------------------------------------------------------------------------------- planted faults


class LeakyPool(kvpool.Pool):
    """Loses one block when the first sequence finishes."""

    leaked = False

    def close(self, handles):
        if not self.leaked:
            self.leaked = True
            self.blocks.alloc()
        return super().close(handles)


class BrokenPool(kvpool.Pool):
    """Cannot step."""

    def step(self, plan, handles, num_new=1, **options):
        raise RuntimeError("planted")


def forgets_the_first_key(self, keys, values, fetch=PagedKVCache.update_and_fetch):
    if self.empty():
        keys = mx.concatenate([mx.zeros_like(keys[:, :, :1]), keys[:, :, 1:]], axis=2)
    return fetch(self, keys, values)


def keeps_its_forks(self, *args, fork=Batch.fork, kept=[], **options):  # noqa: B006
    kept.append(fork(self, *args, **options))  # their blocks never come back
    return kept[-1]


def swaps_states(layout, held, rows, chosen=passes.chosen):
    return chosen(layout, held, rows[::-1])


def positions_restart(self, offset=PagedKVCache.offset.fget):
    return offset(self) - int(self.batch.rows.gone[0])


def keeps_the_newest(self, row, kv_len, target):
    places = np.r_[: self.policy.sink, kv_len - target + self.policy.sink : kv_len]
    return np.broadcast_to(places, (self.scores.shape[0], self.scores.shape[2], target)).copy()


TALK = models.CONVERSATION


@pytest.mark.parametrize(
    ("part", "owner", "name", "fault", "broken"),
    [
        (occupancy.PART, kvpool, "Pool", LeakyPool, {"serving_leaks_nothing"}),
        (pools.OUT_OF_BLOCKS, kvpool, "Pool", BrokenPool, set(pools.OUT_OF_BLOCKS.promises)),
        (ENGINE, PagedKVCache, "update_and_fetch", forgets_the_first_key, {"tokens_identical"}),
        (ENGINE, Batch, "fork", keeps_its_forks, {"no_blocks_leaked"}),
        (models.LAYERS, passes, "chosen", swaps_states, {"layers_tokens_identical", "layers_batch_is_alone"}),
        (TALK, H2O, "lens_after", lambda self, lens, block_size: lens, {"budget_held"}),
        (TALK, PagedKVCache, "offset", property(positions_restart), {"positions_go_on"}),
        (TALK, Memory, "select", keeps_the_newest, {"remembers_older"}),
    ],
)
def test_fault_breaks_its_claim_and_the_verdict(monkeypatch, settings, part, owner, name, fault, broken):
    monkeypatch.setattr(owner, name, fault)
    report = demo.run_parts(replace(settings, talk_tokens=70, block_size=8), [part], lambda line: None)
    found = broken_claims(report)
    assert (found >= broken if part is TALK else found == broken) and not report.held


def test_demo_part_that_raises_does_not_stop_the_others(monkeypatch, settings, capsys):
    monkeypatch.setattr(occupancy, "draw", lambda *args: 1 / 0)
    report = demo.run_parts(settings, CORE_PARTS, lambda line: None)
    assert broken_claims(report) == set(occupancy.PART.promises)
    assert report.not_run == {"occupancy": "stopped by ZeroDivisionError: division by zero"}
    assert "Traceback" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- a checkpoint


def test_demo_runs_on_a_checkpoint(small_demo, tmp_path, capsys):
    tiny.save(tmp_path)
    status = run_demo("--json", "--model", str(tmp_path), "--out", str(tmp_path / "p.png"))
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["not_run"] == {}, err
    assert status == 0
    assert result["numbers"]["engine"]["model"] == f"checkpoint {tmp_path}"
    assert len(set(result["numbers"]["engine"]["prompt_lengths"])) > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--model", "."), "--model .: a folder without config.json"),
        (("--out", "."), "this is a folder"),
        (("--out", "no/where.png"), "there is no folder"),
    ],
)
def test_demo_without_a_model_or_a_place_for_its_picture_is_refused(tmp_path, monkeypatch, capsys, wrong, said):
    monkeypatch.chdir(tmp_path)
    assert run_demo(*wrong) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("python -m benchmarks.demo: ") and said in err and len(err.splitlines()) == 1


# --------------------------------------------------------------------------------- what is not installed


def test_without_mlx_its_parts_are_not_run_and_not_held(small_demo, monkeypatch, tmp_path, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx_lm"]:
        monkeypatch.delitem(sys.modules, name)
    for package, name in ((demo, "kvpool.cli.demo.lm"), (benchmarks.demo, "benchmarks.demo.lm")):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(package, "lm", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert run_demo("--json", "--out", str(tmp_path / "p.png")) == 1
    result = json.loads(capsys.readouterr().out)
    assert set(result["not_run"]) == {"engine", "forks", "shared_prompt", "conversation", "layers"}
    assert all("pip install 'kvpool[mlx]'" in reason for reason in result["not_run"].values())
    assert result["claims"]["tokens_identical"] is False
    assert result["claims"]["step_same_tables"] is True


# -------------------------------------------------------------------------------------------- the picture


def test_picture_is_a_large_png_in_several_colours(settings):
    assert demo.run_parts(settings, [occupancy.PART], lambda line: None).held
    pixels = image.imread(settings.out)[..., :3]
    assert pixels.shape[0] > 600 and pixels.shape[1] > 900
    for color in (OTHER, OTHER_LIGHT, BLOCKS, INK):
        share = np.mean(np.all(np.abs(pixels - to_rgb(color)) < 0.01, axis=-1))
        assert share > 1e-4, f"{color} is hardly in the picture"
    assert 0.2 < np.mean(np.all(pixels == 1.0, axis=-1)) < 0.95


# ----------------------------------------------------------------------------------------------- the table


def printed(report: Report, encoding: str) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    printer = Printer(Console(file=stream, width=80), [part for part, _ in report.outcomes])
    for number, (part, _) in enumerate(report.outcomes):
        printer.begin(number, part)
        printer.end(replace(report, outcomes=report.outcomes[: number + 1]))
    printer.close(report)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_table_marks_what_held_what_failed_and_what_was_not_decided():
    report = Report(seconds=1.5)
    part = Part("p", "a part", {"first": "the first sentence", "second": "the second"}, lambda *args: Outcome({}, {}))
    with pytest.raises(ValueError, match="promised"):
        report.add(part, part.run())
    report.add(part, Outcome({"first": Claim(True, "1 of 1"), "second": Claim(False, "2 of 3")}, {}, ("█ note",)))
    assert all(sign in printed(report, "ascii") for sign in ("ok the first sentence", "NO the second", "# note"))
    report.add_not_run(Part("q", "another part", {"third": "the third"}, part.run), "needs a thing: pip install thing")
    text = printed(report, "utf-8")
    for said in ("needs a thing: pip install thing", "1 of 3 claims held", "A claim that was not decided is not held."):
        assert said in text
    assert report.as_json()["claims"]["third"] is False


def test_demo_into_a_pipe_prints_each_part_as_it_goes(settings):
    raw, seen = io.BytesIO(), []
    console = Console(file=io.TextIOWrapper(raw, encoding="utf-8"), width=80)  # buffers, as a pipe does

    def run_part(settings, say):
        seen.append(raw.getvalue().decode())  # what has left the process
        return Outcome({"claim": Claim(True, "1 of 1")}, {}, (f"note {len(seen)}",))

    parts = [Part(name, f"part {name}", {"claim": f"claim of {name}"}, run_part) for name in "pq"]
    with demo.progress_line(console) as say:
        demo.run_parts(settings, parts, say, Printer(console, parts))
    assert seen[0] == "(a) part p\n"
    assert "claim of p" in seen[1] and "note 1" in seen[1] and seen[1].endswith("(b) part q\n")
