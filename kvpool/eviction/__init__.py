"""Which tokens of a sequence stay when there is no room for all."""
