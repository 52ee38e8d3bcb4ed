"""State machines of Hypothesis that drive a pool beside the plain Python model."""
