"""Programs that look for faults of the core."""
