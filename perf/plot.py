"""Curves drawn to a file with matplotlib, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import machine

HOW_TO_GET = "a plot needs matplotlib: pip install 'prpc-engine[bench]'"
PANEL_INCHES = (6.4, 4.2)


class NoPlot(Exception):
    """What draws is not installed; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. Curves are points (x, y) by the name of the curve."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, list[tuple[float, float]]]
    is_log: bool = False  # both axes, by powers of ten
    given: frozenset[str] = frozenset()  # curves that were not measured here: dashed


def check_possible() -> None:
    """Raises NoPlot where matplotlib is missing: asked before hours of measuring, not after."""
    if not machine.is_installed("matplotlib"):
        raise NoPlot(HOW_TO_GET)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """All panels below each other, in the format that the path ends in: .svg, .png, .pdf. Raises
    NoPlot, OSError, ValueError.
    """
    check_possible()
    # the class itself draws without a display, and without pyplot's globals
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for name, points in panel.curves.items():
            line = "--" if name in panel.given else "-"
            axes.plot(*zip(*sorted(points), strict=True), line, marker="o", label=name)
        if panel.is_log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
