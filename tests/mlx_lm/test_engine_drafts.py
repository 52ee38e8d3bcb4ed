"""`Engine(speculate=...)`: every answer is what the engine gives without drafts.

Random drafts in any company: `test_engine_workloads`.
"""

import weakref

import numpy as np
import pytest
from mlx_models import VOCAB, computing_on_cpu, ended, random_prompts, tiny_llama

from benchmarks import tiny_families
from kvpool import Request
from kvpool.adapters.mlx_lm import DraftModel, Engine, PromptLookup, tiny
from kvpool.adapters.mlx_lm.drafts import Trust
from kvpool.eviction import H2O
from kvpool.scheduler import Decoding

cpu = pytest.fixture(computing_on_cpu, autouse=True)
MANY = 500  # blocks


def facts(completion):
    return [(one.tokens.tolist(), one.finish_reason, one.text) for one in completion.samples]


PROPOSERS = {
    "prompt lookup": lambda model: PromptLookup(5),
    "the model itself": lambda model: DraftModel(model, MANY, num_drafts=3),
    "another model": lambda model: DraftModel(tiny_llama(num_hidden_layers=1), MANY, num_drafts=3),
    "a small pool": lambda model: DraftModel(model, 13, num_drafts=3),
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "seed": 4, "n": 2}, {"presence_penalty": 1.5}])
def test_every_proposer_gives_the_tokens_of_none(model, name, sampling):
    prompts = [[*prompt, *prompt] for prompt in random_prompts((3, 9, 20, 1))]
    plain = [facts(one) for one in Engine(model, MANY).batch(prompts, max_tokens=30, **sampling)]
    proposer = PROPOSERS[name](model)
    engine = Engine(model, MANY, speculate=proposer)
    assert [facts(one) for one in engine.batch(prompts, max_tokens=30, **sampling)] == plain
    counts = engine.scheduler.stats()
    assert counts.drafted_tokens > 0 or "presence_penalty" in sampling  # nothing repeats itself then
    assert engine.kv.pool.stats().used == 0
    if name == "the model itself" and not sampling:
        assert counts.accepted_tokens > 0.95 * counts.drafted_tokens
        assert proposer.engine.kv.pool.stats().used == proposer.engine.num_unfinished == 0


def test_engine_that_nobody_has_any_more_gives_its_memory_back_at_once(model):
    engine = Engine(model, MANY, speculate=PromptLookup(5))
    storage = weakref.ref(engine.kv.backend)
    del engine
    assert storage() is None, "nobody waits for the collector"


def test_draft_model_reads_a_long_text_in_parts(model):
    """No step of the large model waits for more passes of the small one than it has drafts."""
    proposer, passes = DraftModel(model, MANY, num_drafts=3, max_step_tokens=16, prefill_chunk=16), [0]
    logits = proposer.engine._forward._logits

    def counted(*arguments):
        passes[-1] += 1
        return logits(*arguments)

    proposer.engine._forward._logits = counted
    prompts = random_prompts((200, 10))
    plain = [facts(one) for one in Engine(model, MANY).batch(prompts, max_tokens=40)]
    engine, done = Engine(model, MANY, speculate=proposer), {}
    ids = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
    while engine.num_unfinished:
        done |= {completion.id: facts(completion) for completion in engine.step()}
        passes.append(0)
    assert [done[id] for id in ids] == plain
    assert max(passes) <= 4 and passes.count(3) > 3  # one pass more has begun ahead
    assert engine.scheduler.stats().accepted_tokens > 40
    while proposer.engine.num_unfinished:
        proposer.engine.step()
    assert proposer.engine.kv.pool.stats().used == 0


def test_draft_model_that_is_resized_while_it_reads_forgets_what_it_reads_and_drafts_again(model):
    proposer = DraftModel(model, MANY, num_drafts=3, max_step_tokens=16, prefill_chunk=16)
    (prompt,), done = random_prompts((200,)), []
    plain = facts(Engine(model, MANY).generate(prompt, max_tokens=40))
    engine = Engine(model, MANY, speculate=proposer)
    engine.submit(prompt, max_tokens=40)
    pool = proposer.engine.kv.pool
    while pool.stats().used < 20:
        engine.step()
    for num_tokens in (40, 400):
        proposer.resize(num_tokens)
        assert pool.num_blocks == 1 + num_tokens // 4 and pool.stats().used == proposer.engine.num_unfinished == 0
        proposer.engine.scheduler.check()
        done += engine.step()
    while engine.num_unfinished:
        done += engine.step()
    assert facts(done[0]) == plain and engine.scheduler.stats().accepted_tokens > 10


@pytest.mark.parametrize("broken", ["a pass", "an update", "the proposer"])
def test_draft_model_that_raises_once_is_empty_and_goes_on(model, broken):
    proposer = DraftModel(model, MANY, kernels=False)  # plain MLX: a step is out when `update` raises
    engine = Engine(model, MANY, speculate=proposer)
    engine.submit([5, 6, 7], max_tokens=20)
    engine.step()
    part, name = {
        "a pass": (proposer.engine._forward, "_logits"),
        "an update": (proposer.engine.scheduler, "update"),
        "the proposer": (DraftModel, "__call__"),
    }[broken]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(part, name, lambda *arguments: 1 / 0)
        engine.step()
    engine.scheduler.check()
    stats = proposer.engine.kv.pool.stats()
    assert (proposer.engine.num_unfinished, stats.used, stats.pending) == (0, 0, 0)
    (done,) = [completion for _ in range(20) for completion in engine.step()]
    assert facts(done) == facts(Engine(model, MANY).generate([5, 6, 7], max_tokens=20))
    assert engine.scheduler.stats().accepted_tokens > 5


def test_draft_model_shares_no_prefix_between_namespaces(model):
    proposer = DraftModel(model, MANY)
    engine, hits = Engine(model, MANY, speculate=proposer), [0]
    (prompt,) = random_prompts((100,))
    for namespace in (b"bob", b"alice", b"bob"):
        engine.generate(prompt, max_tokens=3, namespace=namespace)
        hits.append(proposer.engine.scheduler.stats().hit_tokens)
    bob, alice, again = np.diff(hits).tolist()
    assert alice == bob and again >= bob + 96


def test_draft_model_with_states_and_other_tokens_gives_the_tokens_of_none(model):
    """Its prefix cache has no checkpoint where a draft was wrong; it has no token above 256."""
    prompts = [[*range(250, 270)], [5] * 30]
    plain = [facts(one) for one in Engine(model, MANY).batch(prompts, max_tokens=60)]
    proposer = DraftModel(tiny_families.make("qwen3_5")[0], MANY)
    engine = Engine(model, MANY, speculate=proposer)
    assert [facts(one) for one in engine.batch(prompts, max_tokens=60)] == plain
    proposer.engine.close()
    assert proposer.engine.kv.pool.stats().used == 0


def test_answer_in_the_form_of_a_grammar_has_no_drafts():
    pytest.importorskip("llguidance")
    model, tokenizer = tiny.make()
    asked = []

    def propose(rows):
        asked.extend(row.request.id for row in rows)
        return [[65, 66, 67]] * len(rows)

    found = []
    for speculate in (None, propose):
        engine = Engine(model, MANY, tokenizer=tokenizer, speculate=speculate)
        engine.submit("number", id="form", grammar=engine.grammars.regex("[0-9]{1,9}"), temperature=1.0, seed=3)
        engine.submit("free", id="free", max_tokens=20)
        found.append({name: facts(one) for name, one in ended(engine).items()})
    assert found[0] == found[1] and set(asked) == {"free"}
    assert found[1]["form"][0][2].isdecimal()


def test_stop_string_inside_right_drafts_ends_the_text_before_it():
    model, tokenizer = tiny.make()
    plain = Engine(model, MANY, tokenizer=tokenizer).generate("Hello", max_tokens=60)
    stop = plain.text[20:23]
    oracle = lambda rows: [plain.tokens[len(row.generated) :][:8] for row in rows]  # noqa: E731
    for engine in (Engine(model, MANY, tokenizer=tokenizer, speculate=one) for one in (None, oracle)):
        events = list(engine.stream("Hello", max_tokens=60, stop=stop))
        assert "".join(event.text for event in events) == plain.text[: plain.text.index(stop)]
        assert [event.finish_reason for event in events if event.finish_reason] == ["stop"]
        assert engine.kv.pool.stats().used == 0


def test_draft_that_the_model_does_not_have_is_dropped(model):
    wrong = lambda rows: [[5, VOCAB, 5]] * len(rows)  # noqa: E731
    engine = Engine(model, MANY, speculate=wrong)
    assert facts(engine.generate([5, 6], max_tokens=12)) == facts(Engine(model, MANY).generate([5, 6], max_tokens=12))
    assert engine.scheduler.stats().drafted_tokens == 9 + 1  # the last token but one has room for none


def test_model_whose_states_take_nothing_back_is_refused(model):
    with pytest.raises(ValueError, match="a state takes no token back"):
        Engine(tiny_families.make("mamba2")[0], 100, speculate=PromptLookup())
    with pytest.raises(ValueError, match="speculate and eviction exclude each other"):
        Engine(model, 100, speculate=PromptLookup(), eviction=H2O(max_kv=64))
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="num_drafts must be 1"):
            PromptLookup(wrong)


# ---- prompt lookup


def looked_up(known, most):
    """What a person would look up: the last place of the longest phrase that ends the text."""
    for size in range(min(6, len(known) - 1), 1, -1):
        places = [i for i in range(len(known) - size) if known[i : i + size] == known[-size:]]
        if places:
            text = list(known)
            for at in range(places[-1] + size, places[-1] + size + most):
                text.append(text[at])
            return text[len(known) :]
    return []


def test_prompt_lookup_finds_what_followed_before():
    rng = np.random.default_rng(3)
    for _ in range(2000):
        known = rng.integers(int(rng.integers(1, 5)), size=int(rng.integers(2, 40)))
        at, most = int(rng.integers(1, len(known))), int(rng.integers(1, 4))
        row = Decoding(Request(known[:at]), 0, known[at:].astype(np.int32), most)
        (found,) = PromptLookup(8)([row])
        assert found.tolist() == looked_up(known.tolist(), most), (known, at)


# ---- trust


def test_trust_comes_back_when_drafts_are_right_again():
    trust, answer = Trust(8), np.arange(400, dtype=np.int32)
    request, at, counts = Request([1], 400, id=0), 1, []
    while at < 300:
        propose = lambda rows, at=at: [answer[at : at + row.most] - (at < 100) for row in rows]  # noqa: E731
        (drafts,) = trust.ask(propose, [Decoding(request, 0, answer[:at], 8)])
        counts.append(len(drafts))
        at += 1 + len(drafts) * (at >= 100)
    assert counts[90] == 0 and counts[-2] == 8


@pytest.mark.parametrize("memory", [0.8, 0.4])
def test_trust_asks_for_a_draft_again_however_many_were_wrong(monkeypatch, memory):
    """With a memory of 0.4, rounding would take the chance to 0."""
    monkeypatch.setattr("kvpool.adapters.mlx_lm.drafts.MEMORY", memory)
    trust, tokens, request, asked = Trust(1), np.arange(16 * 400, dtype=np.int32), Request([1], 10**6, id=0), []
    for length in range(16, len(tokens), 16):
        propose = lambda rows: asked.append(1) or [np.full(row.most, -1, np.int32) for row in rows]  # noqa: E731
        trust.ask(propose, [Decoding(request, 0, tokens[:length], 1)])
    assert len(asked) == 399


def test_trust_is_kept_for_each_sequence():
    trust, tokens = Trust(4), np.arange(50, dtype=np.int32)
    rows = [(Request([1], 60, id=0), 0), (Request([1], 60, id=0), 1), (Request([1], 60, id=1), 0)]
    for at in range(1, 30):

        def propose(rows, at=at):
            return [tokens[at : at + row.most] + (row.request.id + row.index > 0) for row in rows]

        drafts = trust.ask(propose, [Decoding(request, index, tokens[:at], 4) for request, index in rows])
        if at % 16:
            assert [len(one) > 1 for one in drafts] == [True, at == 1, at == 1]
