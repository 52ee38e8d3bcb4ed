"""The official clients, unmodified, of the server of a test file. All servers here that have a key take ``mine``."""

import pytest
from server_process import Server


@pytest.fixture(scope="module")
def server(request):
    """The server with the `OPTIONS` of a test file. At the end it holds no block."""
    with Server(*request.module.OPTIONS) as one:
        yield one
        assert one.idle_metrics(Authorization="Bearer mine")['kvpool_blocks{state="used"}'] == 0


@pytest.fixture(scope="module")
def client(server):
    import openai  # takes two seconds

    return openai.OpenAI(base_url=f"{server.facts['url']}/v1", api_key="mine", max_retries=0)


@pytest.fixture(scope="module")
def messenger(server):
    import anthropic  # takes five seconds

    return anthropic.Anthropic(base_url=server.facts["url"], api_key="mine", max_retries=0)
