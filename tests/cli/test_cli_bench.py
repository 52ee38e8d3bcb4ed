"""`kvpool bench`: a small table that ends soon."""

import json

import pytest

from kvpool.cli import bench, main


def facts_of(capsys, *argv):
    """Run a command that ends well; return its JSON."""
    assert main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_stand_beside_plain_python(capsys):
    facts = facts_of(capsys, "--batch", "2,256", "--prompt", "64", "--block-size", "8", "--repetitions", "1")
    rows, shown = facts["rows"], ("decode step, 2 in", "decode step, 256 in", "fork and close a sequence of 64", "open")
    assert facts["block_size"] == 8 and all(row["kvpool_ns"] > 0 and row["python_ns"] > 0 for row in rows)
    assert all(row["operation"].startswith(text) for row, text in zip(rows, shown, strict=True))
    assert rows[1]["ratio"] > 3  # a batch of 256: two hundred times as many steps of an interpreter


@pytest.mark.parametrize("most", [("--batch", "8k", "--prompt", "1"), ("--prompt", "128k"), ("--block-size", "1k")])
def test_takes_the_largest_sizes_that_it_allows(capsys, monkeypatch, most):
    monkeypatch.setattr(bench, "STEPS", 1)
    monkeypatch.setattr(bench, "_repeated", lambda call, calls: (call, 1))
    assert len(facts_of(capsys, "--repetitions", "1", "--batch", "1", *most)["rows"]) == 3
    option, size = most[:2]
    assert main(["bench", option, str(int(size[:-1]) * 1024 + 1)]) == 2
    assert f"{option} {int(size[:-1]) * 1024 + 1}: out of range" in capsys.readouterr().err


def test_least_seconds_take_turns_and_do_not_count_the_first_call(monkeypatch):
    log, now = [], [0.0]

    def timed(name, *seconds):
        left = list(seconds)

        def call():
            log.append(name)
            now[0] += left.pop(0)

        return call, 2

    monkeypatch.setattr(bench.time, "process_time", lambda: now[0])
    assert bench.least_seconds([timed("a", 0.5, 3.0, 2.0), timed("b", 0.5, 4.0, 6.0)], 2) == [1.0, 2.0]
    assert log == ["a", "b"] * 3
