"""Attention on the CPU, measured: ``python -m benchmarks.attention``."""
