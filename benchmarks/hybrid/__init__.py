"""Prefix hits of hybrid models: the pool beside other policies at equal bytes, on serving traces."""
