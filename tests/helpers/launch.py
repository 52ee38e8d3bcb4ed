"""Starts local processes on MLX's ring by `mlx.launch`, on free ports, and says whether they succeeded.

It needs only mlx. `kvpool.adapters.ranks` is what such processes run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import install_command


@dataclass(frozen=True, slots=True)
class Launched:
    """The result of `launch`.

    Attributes
    ----------
    held : bool
        Every rank printed its last line. (`mlx.launch` returns 0 even if its workers fail.)
    output : str
        Everything that the ranks printed, standard error included.
    """

    held: bool
    output: str


def launch(
    command: Sequence[str], ranks: int, *, timeout: float = 120.0, last_line: str = "rank {rank}: done"
) -> Launched:
    """Run ``python command...`` in `ranks` local processes on MLX's ring, on ports that are free now.

    Parameters
    ----------
    command : sequence of str
        Arguments of the interpreter that runs this.
    ranks : int
    timeout : float
        Seconds; after them all processes are ended, and `held` is False.
    last_line : str
        What rank r prints when it has succeeded, with ``{rank}`` in it.

    Raises
    ------
    FileNotFoundError
        The folder of the interpreter has no ``mlx.launch``. Nothing was started.
    """
    starter = Path(sys.executable).with_name("mlx.launch")
    if not starter.is_file():
        raise FileNotFoundError(
            f"[launch] {starter} does not exist; mlx installs it beside the interpreter: {install_command('mlx')}"
        )
    argv = [
        *(str(starter), "-n", str(ranks), "--backend", "ring"),
        *("--starting-port", str(_free_ports(ranks)), "--", sys.executable, *command),
    ]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
        return Launched(False, f"{output}\n[launch] the ranks were ended after {timeout:g} s, the limit\n")
    lines = output.splitlines()
    return Launched(all(last_line.format(rank=rank) in lines for rank in range(ranks)), output)


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
