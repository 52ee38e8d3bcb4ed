"""Measure this machine: the allocator, and the kernels beside the memory that limits them."""

from kvpool.cli.bench import allocator, attention, metal

COMMANDS = {"allocator": allocator, "attention": attention, "metal": metal}
