"""Measure this machine: kernels beside the yardsticks that limit them."""

from kvpool.cli.bench import attention, metal

COMMANDS = {"attention": attention, "metal": metal}
