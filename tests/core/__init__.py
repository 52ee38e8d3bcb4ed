"""Contract tests of the core."""
