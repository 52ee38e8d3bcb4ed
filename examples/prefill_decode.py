"""One process computes prompts, another generates: K and V go through a store. ``python examples/prefill_decode.py``

The store is a directory here, and a Redis server with `ServerStore`. Each process has a pool and a backend of its own.
The decoding process asks the store for the blocks of a prompt and computes only what they do not cover.
"""

import subprocess
import sys
import tempfile

import numpy as np

from kvpool import KVSpec, Plan, Pool
from kvpool.store import BlockLayout, DiskStore, Layout
from kvpool_backends import load_backend

SPEC = KVSpec(num_layers=1, num_kv_heads=2, head_dim=32, dtype="float32")
LAYOUT = Layout([BlockLayout(SPEC.block_size, SPEC.block_nbytes, str(SPEC))], weights=b"this model, version 1")
PROMPT, ANSWER, VOCABULARY = np.arange(100, dtype=np.int32) % 31, 12, 500
WEIGHTS = np.random.default_rng(0).normal(size=(4, VOCABULARY, 2, 32)).astype(np.float32)  # q, k, v and the head


class Worker:
    """A pool, a backend, a model of one layer, and a store."""

    def __init__(self, directory: str) -> None:
        self.pool = Pool(num_blocks=64, block_size=SPEC.block_size, prefix_cache=True)
        self.plan = Plan(self.pool, 1, 256, backend=(backend := load_backend()(SPEC, 64)))
        self.backend, self.store = backend, DiskStore(directory, LAYOUT, max_nbytes=1 << 30)
        self.store.ready.wait()

    def forward(self, seq: int, tokens) -> int:
        """Compute tokens; returns the next one."""
        self.pool.step(self.plan, [seq], len(tokens))
        step = self.backend.prepare(self.plan)
        self.backend.copy_blocks(self.plan)
        q, k, v = WEIGHTS[:3, tokens]
        self.backend.write(step, 0, self.backend.asarray(k), self.backend.asarray(v))
        out = self.backend.to_numpy(self.backend.attend(step, 0, self.backend.asarray(q)))
        self.pool.done(self.plan)
        return int(np.argmax(np.tensordot(WEIGHTS[3], out[-1], 2)))

    def prefill(self, prompt) -> None:
        """Compute a prompt and store its full blocks."""
        self.forward(seq := self.pool.open(prompt), prompt)
        (blocks,) = LAYOUT.blocks(prompt)
        self.store.store(blocks, self.backend.export_blocks(self.pool.table(seq)[: len(blocks)]))
        self.store.close()  # which waits for what is queued

    def decode(self, prompt, num: int) -> list[int]:
        """Load what the store has of a prompt, compute the rest, generate."""
        (blocks,) = LAYOUT.blocks(prompt[:-1])  # the last token is computed
        rows = np.empty((len(blocks), SPEC.block_nbytes), np.uint8)
        loaded = int(np.cumprod(self.store.load(blocks, rows)).sum())
        seq = self.pool.open(prompt, load=True)
        self.backend.import_blocks(self.pool.table(seq)[:loaded], rows[:loaded])
        self.pool.loaded(seq, known := loaded * SPEC.block_size)
        self.pool.prefix.commit(seq, prompt[:known])
        print(f"{known} of {len(prompt)} tokens come from the store")
        answer = [self.forward(seq, prompt[known:])]
        while len(answer) < num:
            answer.append(self.forward(seq, answer[-1:]))
        return answer


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as empty:
        subprocess.run([sys.executable, __file__, directory], check=True)
        answer, alone = Worker(directory).decode(PROMPT, ANSWER), Worker(empty).decode(PROMPT, ANSWER)
    assert answer == alone
    print(answer)


if __name__ == "__main__":
    Worker(sys.argv[1]).prefill(PROMPT) if sys.argv[1:] else main()
