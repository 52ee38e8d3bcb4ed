"""A server that speaks OpenAI's and Anthropic's HTTP API, on `kvpool.adapters.mlx_lm.Engine`: ``kvpool serve``.

- `runner`: one thread owns the engine. Requests go to it, events come back to the event loop.
- `requests`: what clients may send, checked before the queue.
- `answers`: what they get, whole or in pieces. `messages`: both, in the form of Anthropic's API.
- `app`: the ASGI application: routes, refusals, one request from its bytes to its end.
- `process`: socket, signals, and an orderly end.

It needs the extra ``serve``. docs/serving.md says what it promises.
"""
