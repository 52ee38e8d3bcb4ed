"""Bugs that other KV-cache managers reported, as tests: docs/regressions.md lists them."""
