"""Facts about this machine from the operating system."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """Return the name of the CPU; its architecture if the system does not tell."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def cache_nbytes() -> int | None:
    """Return the size of the largest cache of the first CPU, None where the system does not tell."""
    sizes = [read_text(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [re.fullmatch(r"(\d+)([KMG])", size.strip()) for size in sizes]
    return max((int(size[1]) * units[size[2]] for size in found if size), default=None)


def huge_pages() -> str | None:
    """Return when the system backs memory with huge pages: always, madvise (on request) or never."""
    found = re.search(r"\[(\w+)\]", read_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def read_text(path: str | Path) -> str:
    """Return the content of a file of the system, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
