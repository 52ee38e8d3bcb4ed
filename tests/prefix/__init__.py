"""Contract tests of the prefix cache."""
