"""Serving under an open loop: workloads, a harness with a clock, phases and latencies. Knows no framework.

Requests arrive when they arrive, whether the server keeps up or not. `harness.serve` drives any `Server` with a
`Workload` and returns a `Record` of every tick and every token; `phases` and `metrics` say what it means. The command
is ``python -m benchmarks.serving``. Not imported with kvpool.
"""
