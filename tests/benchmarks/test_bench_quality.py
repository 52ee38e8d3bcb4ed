"""`python -m benchmarks.quality` on a model and on documents of nothing."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")
from benchmarks import quality
from benchmarks.command import main


def test_quality_trains_once_and_prints_a_row_per_policy(monkeypatch, capsys, tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    monkeypatch.setattr(quality, "CONFIG", quality.CONFIG | small)
    monkeypatch.setattr(quality, "STAGES", ((2, 2, 96, 2),))
    monkeypatch.setattr(quality, "sources", lambda folder: np.full((2, 4096), ord("x"), np.uint8))
    options = ["--context", "256", "--seeds", "1", "--samples", "1", "--cache-dir", str(tmp_path)]
    main(quality, options)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0][2:] for row in rows] == [policy.name for policy in quality.policies(256)]
    monkeypatch.setattr(quality, "train", lambda *told: pytest.fail("trained again"))
    monkeypatch.setattr(quality, "policies", lambda context: [quality.Policy("unlimited")])
    main(quality, options)
    assert capsys.readouterr().out.splitlines()[2:] == rows[:1]
