"""`python -m benchmarks.quality --model`: a checkpoint from end to end."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import quality_library
from mlx_lm.models.cache import ArraysCache, KVCache

from benchmarks.command import main
from benchmarks.quality import command, corpus, documents, models, policies
from benchmarks.quality.policies import UNLIMITED, rotating
from kvpool.adapters.mlx_lm import tiny

CONTEXT, KEYS = 256, 3  # a byte is a token: more keys do not fit
ASKED = ["--context", str(CONTEXT), "--seeds", "1", "--samples", "1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return quality_library.read(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A llama with random weights and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.save(folder)
    return folder


@pytest.fixture
def short(monkeypatch, text):
    """The command reads a library of its own, and plants few keys."""
    monkeypatch.setattr(corpus, "read", lambda: text)
    monkeypatch.setattr(documents, "written", functools.partial(documents.written, keys=KEYS))


def whole_pass(model, tokens):
    """Nats of all tokens but the first, by one pass without any cache."""
    logits = model.model(mx.array(tokens)).astype(mx.float32)[:, :-1]
    said = mx.take_along_axis(logits, mx.array(tokens)[:, 1:, None], axis=-1)[..., 0]
    return np.array(mx.logsumexp(logits, axis=-1) - said)


def test_command_measures_a_checkpoint_in_its_own_tokens(short, text, checkpoint, capsys):
    assert main(command, [*ASKED, "--model", str(checkpoint), "--tables", "heavy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == str(checkpoint)
    rows = found["tables"]["heavy"]
    assert [row["policy"] for row in rows] == [
        *("unlimited", "rotating (keep 4)", "H2O h=16", "H2O balanced", "H2O heavy"),
    ]
    model = models.Model(str(checkpoint))
    asked = documents.written(text, model.tokenizer, CONTEXT, 1, 1)
    assert rows[0]["nats_of_seeds"] == pytest.approx([whole_pass(model, asked.tokens).mean()], abs=0.02)
    each = UNLIMITED.bytes_per_token(2, (32, 32), 3)
    half = CONTEXT // 2
    assert [row["kv_bytes"] for row in rows[:2]] == [CONTEXT * each, half * each]
    assert all((half - 16) * each <= row["kv_bytes"] <= half * each for row in rows[2:])


def test_policies_are_refused_where_their_caches_do_not_go(checkpoint, monkeypatch):
    plain = models.Model(str(checkpoint))
    plain.check(policies.compared(64))
    with pytest.raises(ValueError, match=r"^\[KVSpec\] head_dim is 32, not a multiple of quant_group_size 64"):
        plain.check([replace(UNLIMITED.stored(8, 8), group_size=64)])
    monkeypatch.setattr(plain.model, "make_cache", lambda: [KVCache(), ArraysCache(2), KVCache()])
    plain.check([UNLIMITED])
    with pytest.raises(ValueError, match=r"^\[quality\] layer 1 uses ArraysCache, rotating"):
        plain.check([rotating(64)])
