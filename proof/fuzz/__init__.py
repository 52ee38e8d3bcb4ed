"""The fuzzer of the compiled core: random programs below Python's speed, and a judge that keeps books of its own."""
