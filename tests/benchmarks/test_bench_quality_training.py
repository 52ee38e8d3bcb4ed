"""The model of `python -m benchmarks.quality`: its text, its gradients, its training and the folder it is kept in."""

from __future__ import annotations

import numpy as np
import pytest
import quality_library

from benchmarks.quality import corpus, training
from benchmarks.quality.network import Pass, Shape, initial
from benchmarks.quality.training import Recipe, Stage

mx = pytest.importorskip("mlx.core")
SMALL = Shape(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return quality_library.read(tmp_path_factory.mktemp("library"), functions=20)


def test_gradients_are_those_that_mlx_derives_from_mlx_lm():
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    rng = np.random.default_rng(0)
    weights, tokens = initial(SMALL, rng), rng.integers(0, 128, (3, 17)).astype(np.int32)
    importance = rng.random((3, 16)).astype(np.float32)
    run = Pass(SMALL, weights, tokens[:, :-1])
    loss, entropy = run.loss(tokens[:, 1:], importance)
    ours = run.gradients()
    model = llama.Model(llama.ModelArgs.from_dict(SMALL.config()))
    model.load_weights([(name, mx.array(w)) for name, w in weights.items()])

    def their_loss(model):
        found = nn.losses.cross_entropy(model(mx.array(tokens[:, :-1])), mx.array(tokens[:, 1:]))
        return (found * mx.array(importance)).sum() / importance.sum()

    expected, gradients = nn.value_and_grad(model, their_loss)(model)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert entropy.shape == (3, 16)
    theirs = dict(tree_flatten(gradients))
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], np.array(gradient), atol=1e-5 * np.abs(ours[name]).max(), err_msg=name)


def test_held_out_files_are_never_trained_on(text):
    assert len(text.train) > 4 * len(text.held_out) > 0
    first_lines = {line for line in text.held_out.tobytes().split(b"\n") if line.startswith(b"#")}
    assert first_lines and not first_lines & set(text.train.tobytes().split(b"\n"))


@pytest.mark.parametrize("uses", [1, 3])
def test_every_key_is_defined_once_early_and_recalled_later(text, uses):
    rng = np.random.default_rng(1)
    for _ in range(20):
        document, marks = corpus.planted(rng, text.train, 300, uses, after=50)
        assert document.shape == marks.shape == (300,)
        assert marks.sum() == uses * corpus.KEYS
        is_definition = document >= corpus.BYTES + corpus.KEYS
        (defined,) = np.flatnonzero(is_definition & ~marks)[None]
        keys = (document - corpus.BYTES - corpus.KEYS) // corpus.VALUES
        assert sorted(keys[defined]) == list(range(corpus.KEYS))
        assert defined.max() < 300 // 4 + corpus.KEYS
        for place in np.flatnonzero(marks):
            assert document[place - 1] == corpus.BYTES + keys[place]
            assert document[place] == document[defined[keys[defined] == keys[place]][0]]
            assert place - defined.max() > 50
        assert corpus.BYTES + corpus.KEYS - 1 in document and document.max() < corpus.VOCAB_SIZE


def test_training_learns_is_repeatable_and_is_kept(text, tmp_path):
    recipe = Recipe(shape=SMALL, stages=(Stage(25, 4, 48), Stage(5, 2, 96, 2)), warm_up=5)
    seen = []
    folder = training.trained(tmp_path / "cache", recipe, text, lambda step, recall, other: seen.append((step, other)))
    assert [step for step, _ in seen] == list(range(1, 31))
    assert seen[-1][1] < 0.9 * seen[0][1]
    kept = (folder / "model.safetensors").read_bytes()
    assert training.trained(tmp_path / "cache", recipe, text, lambda *told: pytest.fail("trained again")) == folder
    other = training.trained(tmp_path / "other", recipe, text, lambda *told: None)
    assert other.name == folder.name and (other / "model.safetensors").read_bytes() == kept
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_the_checkpoint_is_one_of_mlx_lm(text, tmp_path):
    from mlx_lm.utils import load_model

    weights = initial(SMALL, np.random.default_rng(3))
    training.save(tmp_path, SMALL.config(), weights)
    model, _ = load_model(tmp_path)
    tokens = np.arange(20, dtype=np.int32)[None]
    ours = Pass(SMALL, weights, tokens).logits()
    np.testing.assert_allclose(np.array(model(mx.array(tokens))), ours, atol=2e-5)
