"""Every model file of mlx-lm beside mlx-lm itself: route, bytes and time. ``python -m benchmarks.models``.

Not imported with kvpool.
"""
