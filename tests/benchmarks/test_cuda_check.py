"""``python -m benchmarks.cuda_check``: what it says without a GPU, and how it goes on after a part."""

import json

import mlx.core as mx
import pytest

from benchmarks import cuda_check


def test_command_without_cuda_says_what_it_needs(capsys):
    assert cuda_check.main() == 2
    assert "MLX does not compute with CUDA here" in capsys.readouterr().err


def test_parts_that_ended_are_kept_and_what_fails_stands_in_its_place(monkeypatch, tmp_path, capsys):
    ran = []

    def part(name, *lines):
        def run():
            ran.append(name)
            if name == "breaks":
                raise ValueError("no memory")
            yield from lines

        return run

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a GPU"})
    monkeypatch.setattr(cuda_check, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(cuda_check, "PARTS", {"first": part("first", "2 ms"), "second": part("breaks")})
    assert cuda_check.main() == 1
    said = capsys.readouterr().out
    assert "# kvpool on a GPU" in said and "2 ms" in said and "FAILED: ValueError: no memory" in said
    assert cuda_check.main() == 1 and ran == ["first", "breaks"]
    (kept,) = json.loads((tmp_path / "state.json").read_text()).values()
    assert list(kept) == ["first", "second"]
    monkeypatch.setattr(cuda_check, "ROOT", tmp_path)  # other kernels
    assert cuda_check.main() == 1 and len(ran) == 4


@pytest.mark.parametrize("name", ["conformance", "tokens"])
def test_part_runs_on_any_device(monkeypatch, name):
    """What it is made of exists; here MLX computes on a CPU."""
    from kvpool.testing import conformance

    monkeypatch.setattr(conformance, "CASES", conformance.CASES[:2])
    lines = list(getattr(cuda_check, name)())
    assert lines and not any(line.startswith("FAILED") for line in lines)


def test_times_stand_beside_those_of_dense_attention(monkeypatch):
    monkeypatch.setattr(cuda_check, "LAYERS", 1)
    line = cuda_check.timed("a case", 2, 32, 4)
    mine, dense, ratio = map(float, line.split()[2:])
    assert mine >= 0 and dense >= 0 and ratio > 0
