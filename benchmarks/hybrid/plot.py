"""The picture: tokens computed that a cache could avoid, over bytes, for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hybrid.measure import BOUND, FULL, PEERS, POOL, Found
from benchmarks.picture import BLOCKS, DASHED, INK, MUTED, OTHER, OTHER_LIGHT, Picture, legend, name

MODEL = "qwen3_5"
SUBTITLE = "Qwen3.5 27B. Tokens computed beyond what no cache can avoid, % of the tokens of all prompts."
STYLES: dict[str, dict[str, Any]] = {
    POOL: {"color": BLOCKS, "linewidth": 2.2, "marker": "o"},
    FULL: {"color": INK, "linewidth": 1.2, "linestyle": DASHED},
    BOUND: {"color": MUTED, "linewidth": 1.0, "linestyle": DASHED},
    **{
        policy: {"color": color, "linewidth": 1.4, "marker": mark}
        for policy, color, mark in zip(PEERS["state"], (OTHER, "#8a5fbf", OTHER_LIGHT), "s^v", strict=True)
    },
}


def draw(path: Path, measured: Sequence[Found]) -> None:
    """Write the picture of one model."""
    settings = list(dict.fromkeys(one.setting for one in measured if one.setting.model == MODEL))
    room = {"left": 0.08, "right": 0.98, "top": 0.8, "bottom": 0.13, "wspace": 0.16}
    picture = Picture((10, 4.6), "Prefix hits at equal bytes", SUBTITLE, grid={"ncols": len(settings)}, room=room)
    for axes, setting in zip(picture.panels[0], settings, strict=True):
        here = [one for one in measured if one.setting == setting]
        for policy, style in STYLES.items():
            line = [one for one in here if one.policy == policy]
            percents = [100 * one.avoidable_tokens / one.prompt_tokens for one in line]
            axes.plot([one.nbytes / 2**30 for one in line], percents, label=policy, markersize=4, **style)
        sizes = sorted({one.nbytes / 2**30 for one in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        name(axes, setting.trace, "%" if setting is settings[0] else "", "GiB for KV and checkpoints")
    legend(picture.panels[0, 0])
    picture.save(path)
