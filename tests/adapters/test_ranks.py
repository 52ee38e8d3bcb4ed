"""Pools on two real processes over loopback: equal, different, one of them gone, one of them silent."""

import json
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="the ranks talk through mlx")

from launch import launch  # noqa: E402

from kvpool import Group, Plan, Pool  # noqa: E402
from kvpool.adapters.ranks import RankLost, Ranks  # noqa: E402
from kvpool.errors import OutOfBlocks  # noqa: E402

HELPERS = Path(__file__).parents[1] / "helpers"
SCRIPT, ENGINE = str(HELPERS / "rank_script.py"), str(HELPERS / "rank_engine.py")
STEPS, WHEN = 12, 5  # as in the script


@pytest.fixture(autouse=True)
def project_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(SCRIPT).parent.parent))


def run(fault):
    launched = launch([SCRIPT, fault], 2, timeout=1200)
    print(launched.output)
    assert "the ranks were ended" not in launched.output  # whatever happens to one, all end by themselves
    return launched


def test_ranks_equal_calls_agree_in_every_step():
    launched = run("none")
    assert launched.held
    digests = re.findall(rf"^rank \d digest (\w+) after {STEPS}$", launched.output, re.MULTILINE)
    assert len(digests) == 2 and len(set(digests)) == 1


SAID = {  # what a rank that goes wrong makes each rank say, or one of them; and after how many passes both stop
    "diverge": ({f"rank {rank} stopped: RanksDisagree [agree] pools differ in step {WHEN}: " for rank in range(2)}, 2),
    "batch": ({f"rank {rank} stopped: RanksDisagree [agree] batches differ in step {WHEN}: " for rank in range(2)}, 2),
    "words": (
        {
            f"rank 0 stopped: RanksDisagree [agree] batches differ in step {WHEN}: ",
            f"rank 1 stopped: TypeError [agree] batch must be bytes or integers in step {WHEN}: they are <U1",
        },
        2,
    ),
    "leave": ({f"rank 0 stopped: RankLost [agree] rank 0 of 2 lost another one in step {WHEN}"}, 0),
    "model-leave": ({f"rank 0 stopped: RankLost [step] rank 0 of 2 lost another one in step {WHEN}: [ring] "}, 0),
    "hang": ({f"[agree] rank 0 of 2: step {WHEN} is not over after 3 s, the limit"}, 0),
    "crash": (set(), 0),  # rank 0 sees it by itself, or is ended by mlx.launch: whichever is first
}


@pytest.mark.parametrize("fault", SAID)
def test_ranks_of_which_one_goes_wrong_stop_and_say_so(fault):
    launched, (words, stopped) = run(fault), SAID[fault]
    assert not launched.held and "done" not in launched.output
    assert all(each in launched.output for each in words)
    assert launched.output.count(f"after {WHEN - 1} passes") >= stopped  # the wrong step has reached no sum


def test_ranks_one_hangs_in_the_model_all_end_in_time():
    launched = run("model-hang")
    said = [f"[step] rank {rank} of 2: step {WHEN} is not over after 3 s, the limit" for rank in range(2)]
    assert any(line in launched.output for line in said)  # whoever is first ends, and mlx.launch ends the other
    assert not launched.held and "digest" not in launched.output  # neither came through


def test_ranks_of_one_agree_with_themselves_and_call_back_when_late():
    group = mx.distributed.init(backend="any")
    assert group.size() == 1
    late, pool, together = [], Pool(8, 4, seed=1), threading.Barrier(2, timeout=20)
    with pytest.raises(ValueError, match="timeout is 0"):
        Ranks(group, timeout=0)
    with Ranks(group, timeout=0.05, on_timeout=lambda said: late.append(said) or together.wait()) as ranks:
        assert ranks.agree(pool) == pool.digest()
        for step in (7, 8):  # the first callback waits for the second
            ranks._expect(("agree", step))  # as if the others were silent
            while len(late) < step - 6 and ranks._watch.is_alive():
                time.sleep(0.01)
        assert late == [f"[agree] rank 0 of 1: step {step} is not over after 0.05 s, the limit" for step in (7, 8)]
    assert not ranks._watch.is_alive()
    with Ranks(group, timeout=float("inf")) as ranks, ranks.step(pool):
        ranks._watch.join(0.1)
        assert ranks._watch.is_alive()


def test_step_of_one_rank_reraises_its_own_error():
    pool = Pool(8, 4, seed=1)
    with Ranks(mx.distributed.init(backend="any")) as ranks:
        with ranks.step(pool, batch=[1, 2]) as digest:
            assert digest == pool.digest() and ranks._waiting == ("step", 1)
            ranks.agree(pool)
            assert ranks._waiting == ("step", 1)  # watched again after the comparison inside
        for error in (RuntimeError("the sampler failed"), OutOfBlocks("[step] full"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as caught, ranks.step(pool):
                raise error
            assert caught.value is error and ranks._waiting is None
        message = r"^\[step\] rank 0 of 1 lost another one in step 6: \[ring\] gone$"
        with pytest.raises(RankLost, match=message), ranks.step(pool):
            raise RuntimeError("[ring] gone")


def test_ranks_see_a_layer_group_that_differs():
    def pool():
        return Pool(32, 4, seed=1, groups=[Group.full(), Group.full(columns=2), Group.state(4)])

    one, other = pool(), pool()
    with Ranks(mx.distributed.init(backend="any")) as ranks:
        rows = [each.open() for each in (one, other)]
        for each, seq in zip((one, other), rows, strict=True):
            plan = Plan(each, 1, 9)
            each.step(plan, [seq], 9)
            each.done(plan)
        assert ranks.agree(one) == ranks.agree(other)
        one.compact(rows[0], 3, group=0)
        other.compact(rows[1], 3, group=1)
        assert ranks.agree(one) != ranks.agree(other)


def test_batches_of_other_shapes_or_values_are_distinguished(monkeypatch):
    batches = [None, b"", b"\1", [], [[]], [1], [[1]], [1, 2, 3, 4], [[1, 2], [3, 4]], 1, -1, [2], [1 << 40]]
    same, sent = ([1, 2], (1, 2), np.array([1, 2], np.int32), mx.array([1, 2])), []
    with Ranks(mx.distributed.init(backend="any")) as ranks:
        pool, gather = Pool(8, 4, seed=1), ranks._gather
        monkeypatch.setattr(ranks, "_gather", lambda value, stream: sent.append(value) or gather(value, stream))
        for batch in (*batches, *same):
            ranks.agree(pool, batch=batch)
    assert len(sent) == len(batches) + len(same) and len(set(sent)) == len(batches) + 1
    assert len(set(sent[len(batches) :])) == 1


@pytest.mark.parametrize("batch", [[1.2], 1.0, "ab", [[1], [1, 2]], [None], [1 << 64], [True], object()])
def test_batch_of_no_integers_is_refused_with_the_pool_as_it_was(batch):
    with Ranks(mx.distributed.init(backend="any")) as ranks:
        pool = Pool(8, 4, seed=1)
        before = pool.fingerprint()
        with pytest.raises(TypeError, match=r"^\[agree\] batch must be bytes or integers in step 1: "):
            ranks.agree(pool, batch=batch)
        assert pool.fingerprint() == before
        assert ranks.agree(pool, batch=[1]) == pool.digest() and ranks.steps == 2


def test_engine_on_two_ranks_gives_the_tokens_of_one_process_and_both_stop_where_one_diverges():
    launched = launch([ENGINE], 2, timeout=1200)
    print(launched.output)
    assert launched.held
    seen = [json.loads(text) for text in re.findall(r"^rank \d saw (.*)$", launched.output, re.MULTILINE)]
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0]["same"] == seen[0]["of"] > 0 and seen[0]["leaked"] == 0
    assert 2 * seen[0]["kv_heads"] == seen[0]["whole_kv_heads"]
    assert seen[0]["stopped"].startswith("[agree] pools differ in step 5:")
