"""Measure this machine: kernels beside the yardsticks that limit them."""

from kvpool.cli.bench import attention, metal, serving

COMMANDS = {"attention": attention, "metal": metal, "serving": serving}
