"""A small engine on kvpool, as a user writes it: the type checkers read it, test_user_types.py runs it.

Each line of `wrong` holds one mistake. Its comments name what mypy and pyright have to say of it: a mistake that one of
them does not see is an error in the lint, and so is anything else that they report.
"""

from collections.abc import Sequence
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool import KVSpec, Plan, Pool, Request, Scheduler
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.eviction import H2O
from kvpool.protocol import KVBackend
from kvpool.scheduler import Output, Step
from kvpool_backends import load_backend

VOCAB, HEADS, DIM = 64, 4, 16
SPEC = KVSpec(num_layers=2, num_kv_heads=HEADS, head_dim=DIM, dtype="float32", block_size=4)


class Model:
    """Two layers of attention with random weights."""

    def __init__(self, backend: KVBackend) -> None:
        random = np.random.default_rng(0)
        self.backend = backend
        self.embedding = random.normal(size=(VOCAB, HEADS * DIM)).astype(np.float32)
        self.head = random.normal(size=(HEADS * DIM, VOCAB)).astype(np.float32)
        self.weights = random.normal(size=(SPEC.num_layers, 3, HEADS * DIM, HEADS * DIM)).astype(np.float32) / 8

    def __call__(self, tokens: NDArray[np.int32], plan: Plan) -> NDArray[np.float32]:
        x = self.embedding[tokens]
        self.backend.copy_blocks(plan)
        for layer in range(SPEC.num_layers):
            q, k, v = (x @ self.weights[layer]).reshape(3, len(x), HEADS, DIM)
            self.backend.write(self.backend.prepare(plan), layer, k, v)
            x = x + self.backend.to_numpy(self.backend.attend(self.backend.prepare(plan), layer, q)).reshape(x.shape)
        return x @ self.head


def by_hand(prompt: Sequence[int], num_samples: int = 2, num_tokens: int = 8) -> list[list[int]]:
    """Samples of one prompt, which share its blocks. All are greedy, so all are alike."""
    with Pool(64, SPEC.block_size, prefix_cache=True) as pool:
        assert_type(pool, Pool)
        model = Model(load_backend("cpu")(SPEC, pool.num_blocks))
        formats = ("block_tables", "seq_lens", "cu_q_lens", "slot_mapping")
        plan = Plan(pool, max_rows=8, max_tokens=len(prompt), formats=formats)
        assert_type(plan, Plan)
        first = pool.open(prompt)
        pool.step(plan, [first], len(prompt))
        token = int(model(np.array(prompt, np.int32), plan)[-1].argmax())
        pool.done(plan)
        assert pool.prefix is not None
        pool.prefix.commit(first, prompt)
        rows = np.append(pool.fork(first, num_samples - 1), first)
        last = np.full(num_samples, token, np.int32)
        texts: list[list[int]] = [[token] for _ in rows]
        while len(texts[0]) < num_tokens and pool.can(rows):
            try:
                pool.step(plan, rows)
            except kvpool.OutOfBlocks as error:
                print(error.needed, error.short_by)
                break
            last = model(last, plan).argmax(-1).astype(np.int32)
            pool.done(plan)
            for text, token in zip(texts, last.tolist(), strict=True):
                text.append(token)
        pool.close(rows)
        pool.check()
    return texts


def by_scheduler(prompts: Sequence[Sequence[int]], num_tokens: int = 8) -> dict[object, list[int]]:
    """The same for many prompts, batched by the scheduler."""
    pool = Pool(num_blocks=64, block_size=SPEC.block_size)
    model = Model(load_backend("numpy")(SPEC, pool.num_blocks))
    scheduler = Scheduler(pool, max_running=4, prefill_chunk=8)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(prompt, max_tokens=num_tokens, id=number))
    finished: list[Output] = []
    while (step := scheduler.schedule()) is not None:
        assert_type(step, Step)
        logits = model(step.tokens, step.plan)
        finished += scheduler.update(step, logits[step.sample_at].argmax(-1).astype(np.int32))
    return {output.id: output.tokens.tolist() for output in finished}


def wrong(pool: Pool, plan: Plan, scheduler: Scheduler, backend: KVBackend) -> None:
    """Never called: each line is a mistake."""
    handle = pool.open()
    pool.stpe(plan, [handle])  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    pool.step("plan", [handle])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pool.step(plan, [handle], parts=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    pool.num_blocks = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    Pool(64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Pool(64, 16, num_seqs=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Plan(64, 8)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Scheduler(64)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Request([1, 2], max_token=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    KVSpec(layers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    KVBlockManager(SPEC, 8).write(0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    H2O(max_kv="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(scheduler.schedule().plan)  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    load_backend(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    backend.attend(0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    print(kvpool.Sheduler)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    (alone,) = by_hand([5, 9, 23, 31, 7, 2], num_samples=1)
    both = by_hand([5, 9, 23, 31, 7, 2])
    served = by_scheduler([[5, 9, 23, 31, 7, 2], [1, 2, 3]])
    assert both == [alone, alone] and served[0] == alone and len(served[1]) == len(alone), (alone, both, served)
    print(alone)
