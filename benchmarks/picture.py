"""The one look of all pictures, drawn by matplotlib without a window."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvpool.cli.console import CommandError

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
BLOCKS, BLOCKS_LIGHT, OTHER, OTHER_LIGHT = "#12718a", "#bfe0e6", "#c2571a", "#f6d5bd"
DASHED = (0, (5, 3))


def check(option: str, path: Path) -> None:
    """Refuse, before any work, a picture that cannot be written."""
    if path.is_dir():
        raise CommandError(f"{option} {path}: this is a folder, name a file")
    if not path.parent.is_dir():
        raise CommandError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"{option} {path}: no permission to write it")


class Picture:
    """A figure with a title above and panels below.

    Attributes
    ----------
    panels : array of Axes
        ``[rows, columns]``.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """

    def __init__(
        self, size: tuple[float, float], title: str, subtitle: str = "", *, grid: dict[str, Any], room: dict[str, float]
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=size, dpi=130, facecolor="white")
        FigureCanvasAgg(self.figure)
        self.panels = self.figure.subplots(squeeze=False, **grid)
        self.figure.subplots_adjust(**room)
        lines = 0.17 / size[1]
        self.figure.text(room["left"], 1 - 2.2 * lines, title, size=14, weight="bold", color=INK)
        self.figure.text(room["left"], 1 - 3.8 * lines, subtitle, size=9, color=MUTED)

    def save(self, path: Path) -> None:
        """Write it as a PNG; all panels look alike."""
        for axes in self.panels.flat:
            axes.grid(axis="y", color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(GRID)
        self.figure.savefig(path, format="png")


def name(axes: Any, title: str, unit: str = "", below: str = "") -> None:
    """Name a panel, its values and what is below them."""
    axes.set_title(title, loc="left", size=10.5, color=INK)
    axes.set_ylabel(unit, color=MUTED)
    axes.set_xlabel(below, color=MUTED)


def legend(axes: Any, **where: Any) -> None:
    """Say what the lines of a panel are, in its upper right corner if nobody says where."""
    axes.legend(**({"loc": "upper right"} | where), frameon=False, fontsize=8.5, labelcolor=INK)
