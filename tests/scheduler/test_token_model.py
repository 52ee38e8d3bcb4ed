"""The token model convicts what it is there to convict, and agrees with itself however it is batched."""

from types import SimpleNamespace

import numpy as np
import pytest
from token_model import TokenMemory, TokenModel, salt_of

from kvpool import Plan, Pool

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens", "positions")


class Driver:
    """A pool and its memory; `step` runs rows of (handle, tokens) and returns the states of the new tokens."""

    def __init__(self, num_blocks=32, block_size=4, **options):
        self.pool = Pool(num_blocks, block_size, max_seqs=16, seed=1, **options)
        self.plan = Plan(self.pool, 16, 256, formats=FORMATS)
        self.model = TokenModel()
        self.memory = TokenMemory(self.model, num_blocks, block_size)

    def step(self, rows, salts=0, spoil=None):
        self.pool.step(self.plan, [h for h, _ in rows], [len(t) for _, t in rows])
        names = (*FORMATS, "copies", "handles", "num_tokens")
        plan = SimpleNamespace(**{name: np.copy(getattr(self.plan, name)) for name in names})
        if spoil is not None:
            spoil(plan)
        states = self.memory.forward([t for _, tokens in rows for t in tokens], plan, salts)
        self.pool.done(self.plan)
        return states


def test_states_however_the_tokens_are_chunked_are_those_of_the_whole():
    driver, rng = Driver(), np.random.default_rng(3)
    histories = [rng.integers(64, size=n) for n in (1, 9, 23)]
    handles = [driver.pool.open() for _ in histories]
    found = [[] for _ in histories]
    while any(len(f) < len(h) for f, h in zip(found, histories, strict=True)):
        rows = []
        for handle, history, f in zip(handles, histories, found, strict=True):
            rows.append((handle, history[len(f) : len(f) + int(rng.integers(0, 6))].tolist()))
        states = driver.step(rows)
        for f, (_, tokens) in zip(found, rows, strict=True):
            f += states[: len(tokens)].tolist()
            states = states[len(tokens) :]
    for f, history in zip(found, histories, strict=True):
        assert f == driver.model.states(history).tolist()


def test_states_of_another_namespace_differ():
    model = TokenModel()
    assert model.states([1, 2])[-1] != model.states([1, 2], salt_of(b"lora"))[-1]
    driver = Driver()
    states = driver.step([(driver.pool.open(), [1, 2]), (driver.pool.open(), [1, 2])], salts=[0, salt_of(b"lora")])
    assert states[1] == model.states([1, 2])[-1]
    assert states[3] == model.states([1, 2], salt_of(b"lora"))[-1]


def test_solo_ends_at_eos_and_at_stop_sequences():
    model = TokenModel(seed=5)
    tokens = model.solo([3, 1, 4], 12).tokens.tolist()
    first = tokens.index(tokens[4])
    ended = model.solo([3, 1, 4], 12, eos=(tokens[4],))
    assert (ended.finish_reason, ended.tokens.tolist()) == ("eos", tokens[: first + 1])
    ended = model.solo([3, 1, 4], 12, stop=(tokens[5:8],))
    assert (ended.finish_reason, ended.tokens.tolist()) == ("stop", tokens[:8])


def test_samples_depend_on_seed_index_and_position_only():
    model = TokenModel()
    states = model.states([1, 2, 3, 4])
    alone = [model.sample(states[i : i + 1], [7], [i % 2], [i])[0] for i in range(4)]
    assert model.sample(states, [7] * 4, [0, 1, 0, 1], [0, 1, 2, 3]).tolist() == alone
    runs = [tuple(model.solo([1, 2], 20, seed=7, index=index).tokens.tolist()) for index in (0, 1, 2, 2)]
    assert len(set(runs)) == 3 and runs[3] == runs[2]


def test_wrong_table_entry_is_detected():
    driver = Driver()
    a, b = driver.pool.open(), driver.pool.open()
    driver.step([(a, [1, 2, 3, 4, 5]), (b, [6, 7, 8, 9, 10])])

    def swap(plan):
        plan.block_tables[0, 0] = plan.block_tables[1, 0]

    assert driver.step([(a, [11]), (b, [12])], spoil=swap)[0] != driver.model.states([1, 2, 3, 4, 5, 11])[-1]

    def unwritten(plan):
        plan.block_tables[0, 0] = 31

    with pytest.raises(AssertionError, match=r"row 0 reads slot 124 for position 0, it holds position -1"):
        driver.step([(a, [11])], spoil=unwritten)


def test_forgotten_copy_is_detected():
    driver = Driver()
    a = driver.pool.open()
    driver.step([(a, [1, 2, 3, 4, 5])])
    b = int(driver.pool.fork(a)[0])

    def forget(plan):
        plan.copies = plan.copies[:0]

    with pytest.raises(AssertionError, match="reads slot"):
        driver.step([(a, [6]), (b, [7])], spoil=forget)


def test_same_block_of_another_history_is_detected():
    """The digest of a slot knows what came before it: equal tokens are no equal KV."""
    driver = Driver()
    a, b = driver.pool.open(), driver.pool.open()
    driver.step([(a, [1, 2, 3, 4, 9, 9, 9, 9]), (b, [5, 6, 7, 8, 9, 9, 9, 9])])

    def swap(plan):
        plan.block_tables[0, 1] = plan.block_tables[1, 1]

    rows = [(a, [11]), (b, [11])]
    assert driver.step(rows, spoil=swap)[0] != driver.model.states([1, 2, 3, 4, 9, 9, 9, 9, 11])[-1]


def test_contradicting_arrays_are_detected():
    driver = Driver()
    a, b = driver.pool.open(), driver.pool.open()

    def same_slot(plan):
        plan.slot_mapping[1] = plan.slot_mapping[0]

    with pytest.raises(AssertionError, match="two tokens are written to one slot"):
        driver.step([(a, [1]), (b, [1])], spoil=same_slot)


@pytest.mark.parametrize("eos", [(), (2,)])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_wide_beam_finds_the_best_of_all_continuations(eos, length_penalty):
    """With a beam as wide as the tree nothing is pruned: the result is the best of every possible text."""
    model = TokenModel(vocabulary=4, seed=8)
    prompt, longest = [1, 3, 0], 4

    def texts(tokens):
        for token in range(4):
            text = [*tokens, token]
            if token in eos or len(text) == longest:
                yield text
            else:
                yield from texts(text)

    def score(text):
        states = model.states([*prompt, *text])[len(prompt) - 1 : -1]
        return float(model.logprobs(states)[np.arange(len(text)), text].sum()) / len(text) ** length_penalty

    best = sorted(texts([]), key=score, reverse=True)[:3]
    found = model.beam(prompt, longest, 256, 3, eos=eos, length_penalty=length_penalty)
    assert [g.tokens.tolist() for g in found] == best
    assert [g.score for g in found] == pytest.approx([score(text) for text in best])
