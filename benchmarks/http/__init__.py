"""An open loop over HTTP: `kvpool serve` beside mlx-lm's server, as processes, with the same streamed chats.

`workload` makes the requests, `clients` sends them from a process of its own, `servers` starts the servers, `judge`
says what came of a run from the bytes that the clients got. The command is ``python -m benchmarks.http``.
"""
