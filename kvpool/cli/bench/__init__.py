"""Measure this machine: kernels beside the yardsticks that limit them."""

from kvpool.cli.bench import attention, metal, quality, serving

COMMANDS = {"attention": attention, "metal": metal, "quality": quality, "serving": serving}
