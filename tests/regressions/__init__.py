"""Bugs that other KV-cache managers reported, as tests: README.md lists them."""
