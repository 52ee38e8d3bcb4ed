"""Measure this machine: the allocator, and the kernels compared with memory bandwidth."""

from kvpool.cli.bench import allocator, attention, metal

COMMANDS = {"allocator": allocator, "attention": attention, "metal": metal}
