"""`python -m benchmarks.quality`: its tables, its training, its gates and the faults that they catch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import quality_library

from benchmarks.command import main
from benchmarks.gate import Gate
from benchmarks.quality import command, corpus, documents, gates, models, subjects, tables, training
from benchmarks.quality.answers import Answer, Quality, more
from benchmarks.quality.network import Pass, Shape, initial
from benchmarks.quality.settings import TABLES, Settings
from benchmarks.quality.training import Recipe, Stage

mx = pytest.importorskip("mlx.core")
SMALL = Shape(vocab=corpus.VOCAB_SIZE, dim=16, layers=2, heads=4, kv_heads=2, head_dim=32, hidden=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return quality_library.read(tmp_path_factory.mktemp("library"))


def instant(model, documents, policy):
    """An answer that costs nothing."""
    shape = (len(documents), documents.shape[1] - 1)
    return Answer(np.ones(shape, np.float32), np.zeros(shape, bool), policy.max_kv, 0.0)


@pytest.fixture
def small(monkeypatch, text):
    """The command trains a model of nothing, in a second, on a library of its own, and answers at once."""
    recipe = Recipe(shape=SMALL, stages=(Stage(3, 2, 64),), warm_up=1)
    make = subjects.make
    monkeypatch.setattr(models.Model, "answer", instant)
    monkeypatch.setattr(subjects, "make", lambda s, *, quiet: make(s, quiet=quiet, recipe=recipe, text=text))


# ---------------------------------------------------------------------------------------------------- rows


def test_quality_is_counted_seed_by_seed():
    tokens, recalled = np.zeros((4, 5), np.int32), np.zeros((4, 5), bool)
    recalled[:, 4] = True
    asked = documents.Documents(tokens, recalled, np.array([0, 0, 1, 1]))
    nats = np.array([[1, 1, 1, 5], [1, 1, 1, 5], [2, 2, 2, 2], [2, 2, 2, 2]], np.float32)
    found = Quality.of(asked, Answer(nats, nats > 2, 10.0))
    assert found.nats.tolist() == [2, 2] and found.code_nats.tolist() == [1, 2] and found.recall.tolist() == [1, 0]
    assert found.perplexity == pytest.approx(np.exp(2)) and found.code_perplexity == pytest.approx(np.exp(1.5))
    difference, error = more(np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 0.0]))
    assert difference == 2 and error == pytest.approx(3**-0.5)
    assert more(np.array([1.0]), np.array([0.0])) == (1.0, float("inf"))


# ----------------------------------------------------------------------------------------------- training


def test_training_learns_is_repeatable_and_is_kept(text, tmp_path):
    recipe = Recipe(shape=SMALL, stages=(Stage(25, 4, 48), Stage(5, 2, 96, 2)), warm_up=5)
    seen = []
    folder = training.trained(tmp_path / "cache", recipe, text, lambda step, recall, other: seen.append((step, other)))
    assert [step for step, _ in seen] == list(range(1, 31))
    assert seen[-1][1] < 0.9 * seen[0][1]
    assert training.trained(tmp_path / "cache", recipe, text, lambda *told: pytest.fail("trained again")) == folder
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_the_checkpoint_is_one_of_mlx_lm(tmp_path):
    from mlx_lm.utils import load_model

    weights = initial(SMALL, np.random.default_rng(3))
    training.save(tmp_path, SMALL.config(), weights)
    model, _ = load_model(tmp_path)
    tokens = np.arange(20, dtype=np.int32)[None]
    np.testing.assert_allclose(np.array(model(mx.array(tokens))), Pass(SMALL, weights, tokens).logits(), atol=2e-5)


# --------------------------------------------------------------------------------------------------- gates


def quality(nats, recall):
    """A row of three seeds."""
    each = np.array([0.0, 0.001, -0.001])
    return Quality(nats + each, nats + each, np.full(3, recall), 1.0, 1.0)


# ------------------------------------------------------------------------------------------------- command


def test_json_has_every_table_and_gates_decide_the_exit_status(small, capsys, tmp_path, monkeypatch):
    args = ["--context", "256", "--samples", "1", "--cache-dir", str(tmp_path), "--json", "--gates"]
    assert main(command, args) == 1, "this model can recall nothing"
    found = json.loads(capsys.readouterr().out)
    assert set(found["tables"]) == set(TABLES)
    assert found["held"] is False and not all(gate["holds"] for gate in found["gates"])
    for name, rows in found["tables"].items():
        assert len(rows) == len(tables.ASKED[name](Settings(context=256)))
        for row in rows:
            assert {"policy", "max_kv", "perplexity", "recall", "kv_bytes", "nats_of_seeds"} <= row.keys()
    monkeypatch.setattr(gates, "judge", lambda *_: [Gate("a gate", 0.0, 1.0, True)])
    assert main(command, args) == 0
