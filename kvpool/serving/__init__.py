"""``kvpool serve``: an HTTP server with the APIs of OpenAI and Anthropic, on `kvpool.adapters.mlx_lm.Engine`.

- `runner`: one thread owns the engine. It takes requests, and sends events to the event loop.
- `requests`: what clients may send. It is checked before the engine sees it.
- `texts`: where texts become tokens, in the fair order of tenants; long ones in processes that run `reader`.
- `answers`: what clients get, whole or in pieces.
- `messages`, `responses`: the APIs of that kind, each as the chat that asks for the same.
- `scores`: logprobs of a prompt.
- `app`: the ASGI application: routes, checks, errors. `page.html`: a page for people.
- `process`: socket, signals, orderly end. `log`: its lines, `metrics`: its statistics.

It needs the extra ``serve``. docs/serving.md says what it promises.
"""
