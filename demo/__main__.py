"""`python -m demo`: train on stock DeepSpeed, train patched, compare. See the package."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from importlib.metadata import version

from demo import report
from demo.outcome import Outcome
from demo.ranks import RANKS, RankLost, events

_DESCRIPTION = (
    "Train two losses over one ZeRO-3 forward: on stock DeepSpeed, then with ds_patches. "
    "Exits with 0 if the patched run is right, 1 if it is not, 2 if a rank was lost."
)
_INTRODUCTION = """\
Two losses over one ZeRO-3 forward
  DeepSpeed {deepspeed}, torch {torch}; {ranks} gloo ranks on CPU
  scikit-learn's handwritten digits: what is it, and what did it look like?

    logits, pixels = engine(images)
    engine.backward(digit_loss(logits, labels), retain_graph=True)
    engine.backward(pixel_loss(pixels, images))
    engine.step()"""


def main() -> int:
    """Returns 0 if the patched run is good, 1 if it is not, 2 if a rank was lost."""
    options = _parser().parse_args()
    print(_INTRODUCTION.format(deepspeed=version("deepspeed"), torch=version("torch"), ranks=RANKS))
    try:
        report.heading("Stock DeepSpeed")
        stock = run("stock", options.epochs, options.seed)
        if stock.failed is None:
            report.say("Stock DeepSpeed did not crash here.")
        report.heading("Patched: import ds_patches; ds_patches.apply_all()")
        patched = run("patched", options.epochs, options.seed)
    except RankLost as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    report.heading("Side by side")
    report.table(stock, patched)
    return report.verdict(patched)


def run(side: str, epochs: int, seed: int) -> Outcome:
    """Run the ranks once and show what they report."""
    live = report.Live(epochs)
    with closing(events(side, epochs, seed)) as reported:
        for event in reported:
            live.show(event)
    live.close()
    report.summary(live.outcome)
    return live.outcome


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description=_DESCRIPTION)
    parser.add_argument("--epochs", type=_positive, default=12, help="epochs to train (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
