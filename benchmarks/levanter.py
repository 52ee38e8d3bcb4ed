"""Metadata of a decode step in Levanter's wire format: `kvpool.adapters.jax` beside Levanter's own page table.

    git clone https://github.com/marin-community/levanter
    pip install jax jaxtyping "haliax>=1.4.dev453"
    python -m benchmarks.levanter levanter [--seqs 64] [--tokens 4096] [--steps 64] [--json]

Only its `inference/page_table.py` is imported. Both run on JAX's CPU device and give every sequence one token a step;
timed until the arrays are on the device. What both say of a step has to be the same. Levanter's is one jitted program:
a search through all pages for every page that is taken, a scatter for every token.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kvpool.adapters.jax import PageTable

PAGE = 16


def stock_table(checkout):
    """Levanter's `PageTable`, without the rest of the package, which wants TPUs' and clouds' libraries."""
    folder = Path(checkout) / "src" / "levanter"
    for name, path in (("levanter", folder), ("levanter.inference", folder / "inference")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    if importlib.util.find_spec("levanter.inference.page_table") is None:
        raise SystemExit(f"[benchmarks.levanter] no src/levanter/inference/page_table.py in {checkout}")
    return importlib.import_module("levanter.inference.page_table").PageTable


class Stock:
    """Levanter's table, filled; `step` gives what a decode step needs."""

    def __init__(self, table, num_pages, seqs, pages_per_seq, tokens):
        import haliax

        self.named, self.seqs = haliax.named, seqs
        self.table = table.init(num_pages, seqs, PAGE, pages_per_seq)
        for seq in range(seqs):
            self.table, _ = self.table.assign_seq_id_to_seq(seq)
            self.allocate(jnp.full(tokens, seq, jnp.int32), jnp.arange(tokens, dtype=jnp.int32))

    def allocate(self, slots, positions):
        slots, positions = self.named(slots, "position"), self.named(positions, "position")
        self.table, info = self.table.allocate_for_seq(slots, positions)
        return info

    def step(self, length):
        info = self.allocate(jnp.arange(self.seqs, dtype=jnp.int32), jnp.full(self.seqs, length, jnp.int32))
        fields = (info.seq_lens, info.cu_q_lens, info.page_indices, info.new_token_dests)
        return jax.block_until_ready([field.array for field in fields])


class Ours:
    """The same from kvpool."""

    def __init__(self, num_pages, seqs, pages_per_seq, tokens):
        self.table = PageTable(num_pages, PAGE, seqs, pages_per_seq, max(tokens, seqs))
        self.handles = [self.table.open() for _ in range(seqs)]
        for handle in self.handles:
            self.table.allocate([handle], tokens)
            self.table.done()
        self.decode_shape = seqs

    def step(self, length):
        info = self.table.allocate(self.handles, 1, max_tokens=self.decode_shape)
        self.table.done()
        return jax.block_until_ready([info.seq_lens, info.cu_q_lens, info.page_indices, info.new_token_dests])


def layout(arrays, length, num_pages):
    """What does not depend on which pages were taken: (lengths, offsets, pages of each row, places in the pages).

    A token's page has to be the one that its row's table names.
    """
    seq_lens, cu_q_lens, pages, dests = (np.asarray(array) for array in arrays)
    used = -(-(length + 1) // PAGE)
    num_used = ((pages >= 0) & (pages < num_pages)).sum(1)  # what stands for "no page" differs
    assert (pages[:, used - 1] == dests // PAGE).all(), "a token goes to another page than its table's"
    assert len(set(pages[:, :used].ravel().tolist())) == pages[:, :used].size, "a page has two owners"
    return seq_lens.tolist(), cu_q_lens.tolist(), num_used.tolist(), (dests % PAGE).tolist()


def measure(checkout, seqs, tokens, steps):
    """Medians in ms of steps that take no page and of those that take one for each sequence, of both."""
    pages_per_seq = -(-(tokens + steps) // PAGE)
    num_pages = seqs * pages_per_seq + 1
    tables = {
        "Levanter": Stock(stock_table(checkout), num_pages, seqs, pages_per_seq, tokens),
        "kvpool": Ours(num_pages, seqs, pages_per_seq, tokens),
    }
    times = {(name, takes): [] for name in tables for takes in (False, True)}
    for length in range(tokens, tokens + steps):
        layouts = []
        for name, table in tables.items():
            begin = time.perf_counter()
            arrays = table.step(length)
            if length > tokens:  # the first one compiles
                times[name, length % PAGE == 0].append((time.perf_counter() - begin) * 1e3)
            layouts.append(layout(arrays, length, num_pages))
        assert layouts[0] == layouts[1], f"the two differ at length {length}"
    return {kind: statistics.median(values) for kind, values in times.items()}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levanter", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="folder of Levanter's repository")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    times = measure(asked.checkout, asked.seqs, asked.tokens, max(asked.steps, PAGE + 2))
    rows = {
        "no page is taken" if not takes else "every sequence takes a page": {
            "Levanter ms": times["Levanter", takes],
            "kvpool ms": times["kvpool", takes],
            "times": times["Levanter", takes] / times["kvpool", takes],
        }
        for takes in (False, True)
    }
    if asked.json:
        print(json.dumps(rows))
        return
    print(f"{asked.seqs} sequences of {asked.tokens} tokens, pages of {PAGE}, JAX {jax.__version__}, CPU, medians")
    for name, row in rows.items():
        stock, ours, times = row.values()
        print(f"{name:28} Levanter {stock:7.3f} ms   kvpool {ours:.3f} ms   {times:6.1f} x")


if __name__ == "__main__":
    main()
