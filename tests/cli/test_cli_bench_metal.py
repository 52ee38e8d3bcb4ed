"""`kvpool bench metal`: its code runs here with Metal on a CPU; what it says there about time means nothing."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from kvpool.cli import main
from kvpool.cli.bench import metal
from kvpool.cli.console import CommandError
from kvpool_backends.mlx import metal_kernels

TINY = ["--batch", "1,2", "--context", "40", "--group", "2,4", "--heads", "4", "--head-dim", "32", "--repetitions", "2"]
BLOCKS = ["--block-size", "8,16"]


@pytest.fixture
def fake(monkeypatch, engine):
    monkeypatch.setattr(metal, "metal_device", lambda: "no GPU")
    monkeypatch.setattr(mx.fast, "metal_kernel", engine.factory(0))
    monkeypatch.setattr(metal, "LAYERS_MAX", 2)
    monkeypatch.setattr(metal, "LAYERS_MIN", 2)


def test_every_case_and_block_size_has_a_row(fake, capsys):
    assert main(["bench", "metal", *TINY, *BLOCKS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    sizes = [(row["group"], row["batch"], row["context"], row["block_size"]) for row in rows]
    assert sizes == [(g, b, 40, s) for g in (2, 4) for b in (1, 2) for s in (8, 16)]
    for row in rows:
        assert row["nbytes"] == 2 * row["batch"] * 48 * (4 // row["group"]) * 32 * 2
        assert min(row[name] for name in ("paged", "dense", "gathered", "copy", "gb_per_s", "copy_gb_per_s")) > 0
    assert found["left_out"] == []


def test_the_sweep_prints_the_settings_that_took_least(fake, monkeypatch, capsys, tmp_path):
    """Times are made up, and so is what is best; its file is one that the kernels read."""
    wanted = {"SIMDGROUPS": 4, "ROW_DIMS_MAX": 1024, "PART_TOKENS": 128, "PARTS_MAX": 32}
    before = {name: getattr(metal_kernels, name) for name in wanted}

    def rows(case, block_sizes, repetitions):
        away = sum(getattr(metal_kernels, name) != value for name, value in wanted.items())
        yield {"paged": 1e-5 * (1 + away)}

    monkeypatch.setattr(metal, "case_rows", rows)
    assert main(["bench", "metal", *TINY, "--sweep"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == {"device": "no GPU", **wanted}
    assert {name: getattr(metal_kernels, name) for name in wanted} == before
    file = tmp_path / "settings.json"
    file.write_text(text)
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(file))
    assert {name: metal_kernels.tuned(name, 7) for name in wanted} == wanted
    code = "from kvpool_backends.mlx import metal, metal_kernels as of; "
    code += f"print([getattr(of, name) for name in {list(wanted)}], metal.MetalAttention.part_tokens)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == f"{list(wanted.values())} {wanted['PART_TOKENS']}\n", run.stderr


@pytest.mark.parametrize("text", ["", "[]", '{"SIMDGROUPS": 3}', '{"SIMDGROUPS": "8"}'])
def test_settings_that_make_no_sense_are_named_and_not_used(monkeypatch, caplog, tmp_path, text):
    file = tmp_path / "settings.json"
    file.write_text(text)
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(file))
    assert metal_kernels.tuned("SIMDGROUPS", 4) == 4
    assert str(file) in caplog.text
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(tmp_path / "none"))
    assert metal_kernels.tuned("PART_TOKENS", 128) == 128 and "cannot be read" in caplog.text


CASE = metal.Case("float16", 4, 2, 700, 4, 32, 2 * 2 * 704 * 32 * 2, 1, 1)


def test_every_choice_of_the_sweep_gives_right_results(fake, monkeypatch):
    for name, choices in metal_kernels.CHOICES.items():
        for choice in choices:
            with monkeypatch.context() as patch:
                patch.setattr(metal_kernels, name, choice)
                list(metal.case_rows(CASE, (16,), 1))  # refuses wrong results


def test_a_wrong_result_has_no_time(fake, monkeypatch, capsys):
    monkeypatch.setattr(metal.Paged, "attend", lambda self, q, planes: q)
    assert main(["bench", "metal", *TINY]) == 2
    assert "a result is wrong" in capsys.readouterr().err


def test_without_metal_it_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert main(["bench", "metal"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "kvpool bench metal: MLX has no Metal device here: its kernels are measured on a Mac\n"
    with pytest.raises(CommandError):
        metal.metal_device()
