"""Benchmarks of the core, each row beside a C floor and a pure-Python allocator measured in the same run.

``python -m benchmarks`` runs all of them and prints one table; ``--gates`` fails when a target is missed.
``pytest benchmarks/bench_step.py`` runs one file under pytest-benchmark.
"""
