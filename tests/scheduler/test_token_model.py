"""The token model convicts what it is there to convict, and agrees with itself however it is batched."""

from types import SimpleNamespace

import numpy as np
import pytest
from token_model import TokenMemory, TokenModel

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
