"""Starts local processes on MLX's ring by `mlx.launch`, on free ports, and says whether they succeeded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Launched(NamedTuple):
    """Whether every rank printed its last line (`mlx.launch` returns 0 even if its workers fail), and what all said."""

    held: bool
    output: str


def launch(command: Sequence[str], ranks: int, timeout: float) -> Launched:
    """Run ``python command...`` in `ranks` processes. Each must print ``rank 0: done``. Late ones are ended."""
    starter = [str(Path(sys.executable).with_name("mlx.launch")), "-n", str(ranks), "--backend", "ring"]
    argv = [*starter, "--starting-port", str(_free_ports(ranks)), "--", sys.executable, *command]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return Launched(False, f"{output}\n[launch] the ranks were ended after {timeout:g} s, the limit\n")
    lines = output.splitlines()
    return Launched(all(f"rank {rank}: done" in lines for rank in range(ranks)), output)


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free on this machine now."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count <= 65536 and all(_is_free(first + k) for k in range(count)):
            return first
    raise OSError(f"[launch] no {count} free ports in a row were found")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
