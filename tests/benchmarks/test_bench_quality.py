"""`python -m benchmarks.quality`: its tables, its simulator, its gates and the faults that they catch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import quality_library
from quality_simulator import Simulated

from benchmarks.command import main
from benchmarks.gate import Gate, as_text, held
from benchmarks.quality import command, corpus, documents, gates, models, policies, subjects, tables, training
from benchmarks.quality.answers import Answer, Quality, more
from benchmarks.quality.network import Pass, Shape, initial
from benchmarks.quality.policies import UNLIMITED, Policy, h2o
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


@pytest.fixture(scope="module")
def simulated():
    """A model with random weights."""
    return Simulated(SMALL, initial(SMALL, np.random.default_rng(2)))


@pytest.fixture(scope="module")
def asked(simulated, tmp_path_factory):
    """The same model as mlx-lm runs it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    training.save(folder, SMALL.config(), simulated.weights)
    model = models.Model(str(folder), has_tokenizer=False)
    model.model.load_weights([(name, mx.array(w)) for name, w in simulated.weights.items()])  # not in float16
    return model


@pytest.fixture(scope="module")
def some(text):
    """Documents of 96 tokens."""
    return documents.planted(text, 96, 2, 2)


# ------------------------------------------------------------------------------------------------ simulator


def test_unlimited_policy_equals_one_pass_over_all_tokens(simulated, some):
    found = simulated.answer(some.tokens, UNLIMITED)
    run = Pass(SMALL, simulated.weights, some.tokens[:, :-1])
    _, expected = run.loss(some.tokens[:, 1:], np.ones((4, 95), np.float32))
    np.testing.assert_allclose(found.nats, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["rotating", "h2o", "block", "random"])
def test_a_budget_that_is_never_reached_changes_nothing(simulated, some, kind):
    whole = simulated.answer(some.tokens, UNLIMITED)
    found = simulated.answer(some.tokens, Policy(kind, 96, 48))
    np.testing.assert_array_equal(found.nats, whole.nats)
    assert found.nbytes == whole.nbytes


CHECKED = [UNLIMITED, *policies.compared(64)[1:6], h2o(40, 4), h2o(40).stored(8, 4), UNLIMITED.stored(4, 8)]


@pytest.mark.parametrize("policy", CHECKED, ids=lambda policy: f"{policy.name} {policy.bits}")
def test_model_equals_the_simulator(simulated, asked, some, policy, monkeypatch):
    monkeypatch.setattr(models, "PREFILL", 1)  # a chunk is one look at the scores
    found, expected = asked.answer(some.tokens, policy), simulated.answer(some.tokens, policy)
    np.testing.assert_allclose(found.nats, expected.nats, atol=1e-4)
    if policy.kind in ("h2o", "block") or policy.k_bits:  # mlx-lm's own are allocated in steps
        assert found.nbytes == expected.nbytes


def test_bytes_of_a_token_are_those_of_the_format():
    of = [UNLIMITED.stored(*bits).bytes_per_token(2, (64, 64), 3) for bits in ((None, None), (8, 8), (8, 4), (4, 4))]
    assert of == [1536, 1536 * (8 + 1) / 16, 1536 * (6 + 1) / 16, 1536 * (4 + 1) / 16]


# ---------------------------------------------------------------------------------------------------- rows


def test_documents_ask_for_definitions_more_than_half_a_document_away(some):
    for tokens, recalled in zip(some.tokens, some.recalled, strict=True):
        defined = np.flatnonzero((tokens >= corpus.BYTES + corpus.KEYS) & ~recalled)
        for place in np.flatnonzero(recalled):
            first = defined[tokens[defined] == tokens[place]][0]
            assert place - first > 48
    assert some.seeds.tolist() == [0, 0, 1, 1]
    assert some.take(1).seeds.tolist() == [0, 1]


def test_documents_for_any_tokenizer_ask_at_their_end(text):
    from kvpool.adapters.mlx_lm import tiny

    tokenizer = tiny.make()[1]
    found = documents.written(text, tokenizer, 512, 2, 1, keys=4)
    for tokens, recalled in zip(found.tokens, found.recalled, strict=True):
        said = tokenizer.decode(tokens.tolist())
        first, _, rest = said.partition("# key K")
        assert len(first) < 20
        head, tail = rest[:200], said[-80:]
        for line in tail.split("\n"):
            if line.startswith("# key K"):
                assert line.removeprefix("# key K") in head
        assert tokenizer.decode(tokens[recalled].tolist()).split() == [
            line.split("=")[1].strip() for line in tail.split("\n") if line.startswith("# key K")
        ]
    with pytest.raises(ValueError, match=r"\[documents\] 8 keys take \d+ tokens, too many of 256"):
        documents.written(text, tokenizer, 256, 1, 1)


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


# --------------------------------------------------------------------------------------------------- gates


def quality(nats, recall):
    """A row of three seeds."""
    each = np.array([0.0, 0.001, -0.001])
    return Quality(nats + each, nats + each, np.full(3, recall), 1.0, 1.0)


def answered(**changed):
    """Tables in which all gates hold, but for what is changed."""
    values = {"unlimited": (1.0, 0.98), "rotating": (1.1, 0.05), "h2o": (1.05, 0.9), "random": (1.1, 0.1)}
    values = {kind: quality(*(changed.get(kind) or values.get(kind, (1.2, 0.1)))) for kind in policies.KINDS}
    s = Settings()
    found = {
        name: [(q, values[q.policy.kind]) for q in tables.ASKED[name](s)] for name in ("max_kv", "policies", "bits")
    }
    if "int8" in changed:
        found["bits"] = [(q, quality(*changed["int8"]) if q.policy.k_bits == 8 else a) for q, a in found["bits"]]
    return found


def failed(found):
    """The first words of the gates that do not hold."""
    return {gate.name.split(":")[0].split(" ")[0] for gate in gates.judge(found, 512) if not gate.holds}


def test_gates_hold_where_they_should():
    assert held(gates.judge(answered(), 512)), as_text(gates.judge(answered(), 512))
    assert len(gates.judge(answered(), 512)) == 4 + 4 + 1 + 2, "every budget up to half of the context has one or two"


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"h2o": (float("nan"), float("nan"))}, {"max_kv", "recall", "int8"}),
        ({"unlimited": (1.0, 0.0)}, {"recall"}),
        ({"int8": (1.2, 0.9)}, {"int8"}),
    ],
)
def test_a_gate_that_is_missed_says_so(changed, missed):
    assert failed(answered(**changed)) == missed


# ------------------------------------------------------------------------------------------------- command


def test_the_command_prints_every_table_and_draws(small, capsys, tmp_path):
    picture = tmp_path / "quality.png"
    args = ["--context", "256", "--samples", "1", "--seeds", "1", "--cache-dir", str(tmp_path)]
    assert main(command, [*args, "--plot", str(picture), "--tables", "max_kv"]) == 0
    out = capsys.readouterr().out
    for said in ("rotating (keep 4)", "H2O heavy", "block eviction", "unlimited"):
        assert said in out
    assert picture.read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "300"], "--context 300: not a multiple of 64"),
        (["--tables", "x"], "--tables x: there are policies"),
        (["--gates", "--seeds", "2"], "--seeds 2: the gates need 3 or more"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all: no such folder"),
    ],
)
def test_bad_values_are_named_in_one_line(capsys, options, said):
    assert main(command, [*options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1
