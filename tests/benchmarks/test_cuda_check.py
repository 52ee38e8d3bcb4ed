"""``python -m benchmarks.cuda_check``: what it says without a GPU, and that its parts run."""

import pytest

from benchmarks import cuda_check


def test_command_without_cuda_says_what_it_needs(capsys):
    assert cuda_check.main() == 2
    assert "MLX does not compute with CUDA here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["conformance", "tokens"])
def test_part_runs_on_any_device(monkeypatch, name):
    """What it is made of exists; here MLX computes on a CPU."""
    from kvpool.testing import conformance

    monkeypatch.setattr(conformance, "CASES", conformance.CASES[:2])
    lines = list(getattr(cuda_check, name)())
    assert lines and not any(line.startswith("FAILED") for line in lines)
