"""``kvpool serve``: what clients ask to keep stays cached while others fill the pool, within the share of a tenant."""

import pytest
from server_process import Server

from kvpool.serving.requests import CompletionRequest, Refused

FIRST, LAST = "You answer about block tables, in one word only.", "What maps positions to slots here?"
USER = {"role": "user", "content": LAST}
EPHEMERAL, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def marked(text, mark=EPHEMERAL):
    return [{"type": "text", "text": text, "cache_control": mark}]


def directive(**how):
    return {"retention_directives": [{"priority": 50, **how}]}


def bodies(number):
    """The same prompt in each API. No two numbers have a prefix in common."""
    first = f"{number:02}{FIRST}"
    return first, {
        "/v1/completions": {"prompt": first + LAST},
        "/v1/chat/completions": {"messages": [{"role": "system", "content": first}, USER]},
        "/v1/messages": {"system": first, "messages": [USER]},
        "/v1/responses": {"instructions": first, "input": LAST},
    }


def on_system(first, mark):
    return {"messages": [{"role": "system", "content": marked(first, mark)}, USER]}


CASES = [
    ("/v1/completions", lambda first: {}, "none"),
    ("/v1/completions", lambda first: directive(), "all"),
    ("/v1/completions", lambda first: directive(duration=9.5) | {"cache_salt": "mine"}, "none"),
    ("/v1/completions", lambda first: directive(start=16, end=40, duration=600.0), 32),
    ("/v1/completions", lambda first: {"retention_directives": [{"priority": 0}]}, "none"),
    ("/v1/chat/completions", lambda first: directive(end=None, duration=None), "all"),
    ("/v1/chat/completions", lambda first: {"prompt_cache_retention": "24h"}, "all"),
    ("/v1/chat/completions", lambda first: {"prompt_cache_retention": "in_memory"}, "none"),
    ("/v1/chat/completions", lambda first: on_system(first, HOUR), "first"),
    ("/v1/messages", lambda first: {"system": marked(first)}, "first"),
    (
        "/v1/messages",
        lambda first: {"system": marked(first, HOUR), "messages": [{**USER, "content": marked(LAST)}]},
        "all",
    ),
    ("/v1/messages", lambda first: {"cache_control": HOUR}, "all"),
    ("/v1/responses", lambda first: {"prompt_cache_retention": "24h"}, "all"),
]


def cached(server, path, body, key="one"):
    """Ask for a token. Return how many tokens of the prompt were cached."""
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    status, answer = server.post(path, {"model": "tiny", most: 1, **body}, Authorization=f"Bearer {key}")
    assert status == 200, answer
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]


def crowd(server, blocks):
    """Fill a pool."""
    for number in range(blocks * 20 // 1000 + 1):
        cached(server, "/v1/completions", {"prompt": f"#{number} " * 250}, "two")


@pytest.fixture(scope="module")
def found():
    """For each case, what is cached of its prompt at once, and after others have filled the pool."""
    with Server("--num-blocks", "433", "--kv-block-size", "16") as server:
        asked = [(path, *bodies(number), how) for number, (path, how, _) in enumerate(CASES)]
        told = [(path, all_[path], all_[path] | how(first)) for path, first, all_, how in asked]
        for path, _, keeping in told:
            cached(server, path, keeping)
        at_once = [cached(server, path, keeping) for path, _, keeping in told]
        crowd(server, 433)
        salts = [{name: one for name, one in keeping.items() if name == "cache_salt"} for _, _, keeping in told]
        later = [cached(server, path, body | salt) for (path, body, _), salt in zip(told, salts, strict=True)]
        yield list(zip(at_once, later, strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_prompt_stays_cached_as_far_as_the_request_says(found, number):
    stays, (at_once, later) = CASES[number][2], found[number]
    assert at_once >= 64
    first = (len(FIRST) + 2) // 16 * 16
    least, most = {"none": (0, 0), "all": (at_once, at_once), "first": (first, first + 16)}.get(stays, (stays, stays))
    assert least <= later <= most


def test_tenant_keeps_at_most_its_share(tmp_path):
    """An eighth of 201 blocks, shared 3 : 1."""
    path = tmp_path / "keys.txt"
    path.write_text("alice 3 one\nbob 1 two\n")
    prompt, shares = (
        "A prompt that is longer than what a tenant may keep. " * 8,
        {"one": 201 * 3 // 32, "two": 201 // 32},
    )
    with Server("--num-blocks", "201", "--kv-block-size", "16", "--api-keys", str(path)) as server:
        for key in shares:
            cached(server, "/v1/completions", {"prompt": key + prompt, **directive()}, key)
        crowd(server, 201)
        for key, blocks in shares.items():
            assert cached(server, "/v1/completions", {"prompt": key + prompt}, key) == blocks * 16


@pytest.mark.parametrize(
    "wrong", [{"priority": 101}, {"priority": True}, {}, {"priority": 1, "duration": 0}, {"priority": 1, "end": 0}]
)
def test_wrong_directive_is_refused_with_its_name(wrong):
    with pytest.raises(Refused, match=r"^400: retention_directives"):
        CompletionRequest.of({"prompt": "x", "retention_directives": [wrong]})
