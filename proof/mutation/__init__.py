"""Mutants of the core, all in one build: `schemata` makes them, `tape` records what must not change, `scenarios` are
programs that reach what random ones do not, `equivalents` lists those that change nothing anybody can see."""
