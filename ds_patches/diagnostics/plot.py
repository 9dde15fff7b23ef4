"""`prove --svg`: plots the losses of all sides with matplotlib."""

import os
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from ds_patches.core.errors import FlagError

_GREY = "#808080"
#: For each side the label, a colour visible on white and black, the line style and width.
_CURVES = {
    "PyTorch": ("plain PyTorch", _GREY, "-", 5),
    "stock": ("stock DeepSpeed", "#d9534f", "-", 2),
    "patched": ("patched DeepSpeed", "#2f9e6e", "--", 2),
}
_STYLE: Any = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY
) | {"svg.hashsalt": "ds_patches", "svg.fonttype": "none"}


def check(file: Path) -> None:
    """Raise FlagError if matplotlib is missing, or the file cannot be written."""
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise FlagError(f"--svg: {file} cannot be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FlagError("--svg needs matplotlib: pip install 'ds-patches[plot]'") from error


def draw(title: str, losses: Mapping[str, tuple[float, ...]], file: Path) -> None:
    """Plot the losses of each side by step, without a background; a side without losses crashed."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.6), layout="tight")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        axes.set_title(fill(title, 84), fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        for side, (label, colour, line, width) in _CURVES.items():
            label += ": crashes" * (not losses[side])
            steps = range(1, len(losses[side]) + 1)
            axes.plot(steps, losses[side], line, color=colour, linewidth=width, label=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
