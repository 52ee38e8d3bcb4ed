"""Serving without a network: kvpool's engine beside mlx-lm's own, in one process: ``python -m benchmarks.serving``.

`workload` makes the requests, `lm` has both engines and their models, `harness` lets them work in turns and times each
step, and `gates` says what has to hold.
"""
