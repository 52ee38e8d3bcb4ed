"""``kvpool serve``: tenants share it by weight, priorities and timeouts are kept, and who hangs up waits no longer."""

import argparse
import contextlib
import json
import threading

import pytest
from server_process import Server
from test_serving_limits import ENDLESS, KEY, asking, running, wait_for

from kvpool.cli.console import CommandError
from kvpool.cli.serve import read_keys

KEYS = "# name weight key\nalice 3 one\n\nalice 3 three\nbob 1 two\n"
TEXT = {"prompt": "The block table maps positions to slots", "logit_bias": {"256": -100}, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEYS)
    with Server("--max-running", "1", "--max-waiting", "8", "--api-keys", str(path), "--name", "mini") as one:
        yield one


def as_tenant(key):
    return {"Authorization": f"Bearer {key}"}


def order_of(server, bodies):
    """Send requests one after the other while another one runs; return in which order they were answered."""
    order, threads = [], []

    def ask(name, key, body):
        status, answer = server.post("/v1/completions", TEXT | {"max_tokens": 100} | body, **as_tenant(key))
        assert status == 200, answer
        order.append(name)

    with asking(server, ENDLESS):
        wait_for(server, decoding=1)
        for count, request in enumerate(bodies, 1):
            threads.append(threading.Thread(target=ask, args=request))
            threads[-1].start()
            wait_for(server, waiting=count)
    for thread in threads:
        thread.join()
    return order


def test_flood_of_a_tenant_does_not_hold_another_one_up(server):
    flood = [(f"alice {number}", "one", {}) for number in range(4)]
    assert order_of(server, [*flood, ("bob", "two", {})])[0] == "bob"


def test_request_of_lower_priority_waits_for_others_of_its_tenant(server):
    asked = {"first": 0, "late": 5, "early": -5, "second": 0}
    order = order_of(server, [(name, "one", {"priority": priority}) for name, priority in asked.items()])
    assert order == ["early", "first", "second", "late"]


def test_tenant_fills_its_share_of_the_queue_only(server):
    with contextlib.ExitStack() as stack:
        stack.enter_context(asking(server, ENDLESS))
        wait_for(server, decoding=1)
        for count in range(1, 7):
            stack.enter_context(asking(server, ENDLESS))
            wait_for(server, waiting=count)
        status, headers, text = server.ask("POST", "/v1/completions", TEXT, **as_tenant("three"))
        assert status == 429 and 1 <= int(headers["Retry-After"]) <= 60
        assert json.loads(text)["error"]["code"] == "queue_full"
        many = TEXT | {"prompt": ["a"] * 9}
        assert server.post("/v1/completions", many, **KEY)[0] == 400, "it would never find so many places"
        both = TEXT | {"prompt": ["a", "b"], "timeout": 300}
        with asking(server, ENDLESS, key="two"):
            wait_for(server, waiting=7)
            assert server.post("/v1/completions", both, **as_tenant("two"))[0] == 429, "all of its prompts or none"
        wait_for(server, waiting=6)
        late = TEXT | {"timeout": 0.5, "max_tokens": 1}
        assert server.post("/v1/completions", late, **as_tenant("two"))[0] == 504, "there is a place for the other one"
    wait_for(server, decoding=0, waiting=0)


def test_request_that_waits_longer_than_its_timeout_is_told_so(server):
    late = TEXT | {"timeout": 0.3, "max_tokens": 5}
    with asking(server, ENDLESS):
        wait_for(server, decoding=1)
        status, answer = server.post("/v1/completions", late, **KEY)
        assert (status, answer["error"]["code"]) == (504, "deadline")
        status, text = server.raw("/v1/completions", late | {"stream": True}, **KEY)
        assert status == 200 and "deadline" in text and "[DONE]" not in text
        assert running(server)["waiting"] == 0
    wait_for(server, decoding=0)
    assert server.post("/v1/completions", late | {"timeout": 300}, **KEY)[0] == 200


def test_answer_is_cut_by_its_timeout(server):
    long = TEXT | {"timeout": 3, "max_tokens": 7000}
    status, answer = server.post("/v1/completions", long, **KEY)
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < 7000 and answer["choices"][0]["text"]
    status, text = server.raw("/v1/completions", long | {"stream": True}, **KEY)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert status == 200 and reasons.count("length") == 1 and set(reasons) == {None, "length"} and "[DONE]" in text


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"timeout": -1}, {"timeout": "1"}, {"timeout": 1e9}, {"priority": 1.5}, {"priority": "1"}]
)
def test_wrong_priorities_and_timeouts_are_named(server, wrong):
    status, answer = server.post("/v1/completions", TEXT | wrong, **KEY)
    assert status == 400 and answer["error"]["param"] in wrong


def test_statistics_name_tenants_and_no_keys(server):
    def tokens():
        found = server.metrics(**KEY)
        return [found[f'kvpool_tenant_tokens_total{{tenant="{name}"}}'] for name in ("alice", "bob")]

    alice, bob = tokens()
    assert server.post("/v1/completions", TEXT | {"max_tokens": 8, "cache_salt": "new"}, **as_tenant("two"))[0] == 200
    assert tokens() == [alice, bob + len(TEXT["prompt"]) + 7]
    text = server.get("/metrics", **KEY)[2]
    assert 'kvpool_tenant_waiting{tenant="bob"} 0.0' in text and "three" not in text


def test_keys_of_one_tenant_share_prefixes(server):
    def cached(key):
        status, answer = server.post("/v1/completions", {"prompt": "x" * 64, "max_tokens": 1}, **as_tenant(key))
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("two"), cached("three")] == [0, 0, 48]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bob key", "line 1: must be NAME WEIGHT KEY"),
        ("\nbob 1 key 2", "line 2: must be NAME WEIGHT KEY"),
        ("bob two key", "line 1: the weight of bob two: not a number"),
        ("bob 0 key", "line 1: the weight of bob 0: out of range"),
        ("bob 1e9 key", "line 1: the weight of bob 1e9: out of range"),
        ("bob 1 key\n# more\nbob 2 other", "line 3: bob has two weights, 1 and 2"),
        ("bob 1 key\nalice 1 key", "line 2: alice has the same key as bob"),
        ("bob 1 clé", "line 1: a key must be ASCII"),
        ("bob 1 given", "line 1: bob has the same key as api-key 1"),
    ],
)
def test_wrong_lines_of_keys_are_refused(tmp_path, text, said, monkeypatch):
    monkeypatch.setenv("KVPOOL_API_KEY", "given")
    path = tmp_path / "keys.txt"
    path.write_text(text)
    with pytest.raises(CommandError, match=f"^--api-keys {path}: {said}"):
        read_keys(argparse.Namespace(api_key=[], api_keys=path))
    with pytest.raises(CommandError, match="nothing"):
        read_keys(argparse.Namespace(api_key=[], api_keys=tmp_path / "nothing"))


def test_keys_of_the_command_line_and_of_the_variable_are_tenants_of_weight_1(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL_API_KEY", "three")
    path = tmp_path / "keys.txt"
    path.write_text("bob 2.5 four\n")
    keys, weights = read_keys(argparse.Namespace(api_key=["one", "two"], api_keys=path))
    assert keys == {"one": "api-key 1", "two": "api-key 2", "three": "api-key 3", "four": "bob"}
    assert weights == {"api-key 1": 1, "api-key 2": 1, "api-key 3": 1, "bob": 2.5}
