"""``kvpool serve``: an HTTP server with the APIs of OpenAI and Anthropic, on `kvpool.adapters.mlx_lm.Engine`.

It needs the extra ``serve``. docs/serving.md says what it promises, docs/development.md what is in which module.
"""
