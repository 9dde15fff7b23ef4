"""The picture of what a proof trains to, by matplotlib: `python -m tools.losses NAME FILE.svg`."""

from __future__ import annotations

import sys

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ds_patches.commands import prove

GREY = "#808080"
#: A name, a colour that is seen on white and on black, and a line: wide below, dashed above.
CURVES = {
    "PyTorch": ("plain PyTorch", GREY, "-", 5),
    "stock": ("stock DeepSpeed", "#d9534f", "-", 2),
    "patched": ("patched DeepSpeed", "#2f9e6e", "--", 2),
}
LOOKS = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
)


def draw(title: str, runs: dict[str, prove.Run], file: str) -> None:
    """Draw the losses on no background."""
    with matplotlib.rc_context({**LOOKS, "svg.hashsalt": "ds_patches", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.6), layout="tight")
        axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        for side, (label, colour, line, width) in CURVES.items():
            losses = runs[side].losses
            label += ": crashes" * (not losses)
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, line, color=colour, linewidth=width, label=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    name, file = sys.argv[1:]
    title, text = prove.composed(name)
    draw(title, prove.train(text), file)
