"""`kvpool bench allocator` and `kvpool bench attention`: small tables that end soon."""

import json
from itertools import product

import numpy as np
import pytest

from kvpool.cli import main
from kvpool.cli.bench import allocator, attention
from kvpool.cli.bench.measure import Contestant
from kvpool_backends import load_backend
from kvpool_backends.cpu import isas


def facts_of(capsys, *argv):
    """Run a command that ends well; return its JSON."""
    assert main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_allocator_rows_stand_beside_plain_python(capsys):
    sizes = ("--batch", "2,256", "--prompt", "64", "--block-size", "8", "--repetitions", "1")
    facts = facts_of(capsys, "allocator", *sizes)
    rows, shown = facts["rows"], ("decode step, 2 in", "decode step, 256 in", "fork and close a sequence of 64", "open")
    assert facts["block_size"] == 8 and all(row["kvpool_ns"] > 0 and row["python_ns"] > 0 for row in rows)
    assert all(row["operation"].startswith(text) for row, text in zip(rows, shown, strict=True))
    assert rows[1]["ratio"] > 3  # a batch of 256: two hundred times as many steps of an interpreter


@pytest.mark.parametrize("most", [("--batch", "8k", "--prompt", "1"), ("--prompt", "128k"), ("--block-size", "1k")])
def test_allocator_takes_the_largest_sizes_that_it_allows(capsys, monkeypatch, most):
    monkeypatch.setattr(allocator, "STEPS", 1)
    monkeypatch.setattr(allocator, "_repeated", lambda name, call, calls: Contestant(name, call))
    assert len(facts_of(capsys, "allocator", "--repetitions", "1", "--batch", "1", *most)["rows"]) == 3
    option, size = most[:2]
    assert main(["bench", "allocator", option, str(int(size[:-1]) * 1024 + 1)]) == 2
    assert f"{option} {int(size[:-1]) * 1024 + 1}: out of range" in capsys.readouterr().err


def test_attention_runs_each_instruction_set_layout_and_number_of_threads(monkeypatch, capsys):
    """The backend that is timed is the one that the row names."""
    made, factory = [], load_backend("cpu")

    def seen(spec, num_blocks, **more):
        made.append((more["isa"], spec.layout, more["num_threads"]))
        return factory(spec, num_blocks, **more)

    monkeypatch.setattr("kvpool_backends.load_backend", lambda name: seen)
    sizes = ("--batch", "1", "--context", "40", "--dtype", "float16", "--repetitions", "1")
    facts = facts_of(capsys, "attention", *sizes, "--isa", "all", "--layout", "NHD,HND", "--threads", "1,2")
    wanted = list(product(isas(), ("NHD", "HND"), (1, 2)))
    assert made == wanted == [(row["isa"], row["layout"], row["threads"]) for row in facts["rows"]]


def test_attention_leaves_out_what_does_not_fit(capsys):
    facts = facts_of(capsys, "attention", "--batch", "1", "--context", "1k", "--max-memory", "1MiB")
    assert facts["rows"] == [] and len(facts["left_out"]) == 2


def test_attention_times_the_decode_that_it_says(monkeypatch, capsys):
    """What is timed has the queries of one token per sequence, over the whole context, and stands beside a read."""
    seen, factory = [], load_backend("cpu")

    class Seen(factory):
        def attend(self, step, layer, q, *rest, **more):
            out = super().attend(step, layer, q, *rest, **more)
            seen.append((q.shape, np.isfinite(out).all()))
            return out

    monkeypatch.setattr("kvpool_backends.load_backend", lambda name: Seen)
    sizes = ("--batch", "3", "--context", "40", "--dtype", "float32,bfloat16", "--repetitions", "2")
    rows = facts_of(capsys, "attention", *sizes)["rows"]
    assert set(seen) == {((3, 32, 128), True)} and [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    for row in rows:
        assert row["ratio"] > 0 and row["nbytes"] == attention.Case(row["dtype"], 3, 40, "portable", "NHD", 1).nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        *("--dtype float8", "--isa sse", "--layout NDH", "--threads 0"),
        *("--batch x", "--context 0", "--max-memory much"),
    ],
)
def test_nonsense_is_refused(capsys, wrong):
    assert main(["bench", "attention", *wrong.split()]) == 2
    assert "kvpool bench attention:" in capsys.readouterr().err
