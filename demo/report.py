"""What the terminal shows: plain aligned text of 80 columns, a progress bar on a terminal only."""

from __future__ import annotations

import shutil
import sys
import textwrap
from itertools import zip_longest

from tqdm import tqdm  # type: ignore[import-untyped]

from demo.events import Evaluated, Event, Failed, Patched, Started, Stepped, Warned
from demo.outcome import Outcome

_WIDTH = min(80, shutil.get_terminal_size().columns)
_INDENT = "   "
_NONE = "-"
_COLUMNS = "{:>8}{:>13}{:>13}{:>16}{:>11}{:>16}"


def say(text: str = "") -> None:
    """Print one paragraph, wrapped and indented."""
    for line in textwrap.wrap(text, _WIDTH - len(_INDENT), break_on_hyphens=False):
        print(_INDENT + line, flush=True)


def heading(text: str) -> None:
    """Print a line that a new part begins with."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


class Live:
    """Shows one run while it happens, and collects its outcome."""

    def __init__(self, epochs: int) -> None:
        self.outcome = Outcome(epochs)
        self._warned: set[str] = set()
        self._bar: tqdm[None] | None = None

    def show(self, event: Event) -> None:
        """Take one event and print what is worth it."""
        self.outcome.take(event)
        match event:
            case Patched(lines):
                for line in lines:
                    say(line)
            case Warned(text) if text not in self._warned:  # one line, however many ranks
                self._warned.add(text)
                self.close()
                say(f"warning: {text}")
            case Started(parameters, size):
                say(f"{parameters} parameters, {size:,} bytes in all, partitioned over the ranks")
            case Stepped():
                self._step()
            case Evaluated():
                self._epoch(event)
            case Failed() if event is self.outcome.failed:
                self._failure(event)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _step(self) -> None:
        assert self.outcome.started is not None
        if self._bar is None:
            self._bar = tqdm(
                total=self.outcome.started.steps,
                desc=f"{_INDENT}epoch {len(self.outcome.evaluated)}",
                unit="step",
                ncols=_WIDTH,
                leave=False,
                file=sys.stdout,
                disable=None,  # that is: off unless this is a terminal
            )
        self._bar.update()

    def _epoch(self, event: Evaluated) -> None:
        self.close()
        if event.epoch == 0:
            titles = ("epoch", "digit loss", "pixel loss", "test accuracy", "seconds")
            print("\n" + _COLUMNS.format(*titles, "gradient diff."))
        difference = self.outcome.differences[-1] if event.epoch else None
        print(
            _COLUMNS.format(
                event.epoch,
                f"{event.digit_loss:.4f}",
                f"{event.pixel_loss:.4f}",
                f"{event.accuracy:.1%}",
                f"{event.seconds:.2f}" if event.epoch else _NONE,
                _small(difference),
            ),
            flush=True,
        )

    def _failure(self, event: Failed) -> None:
        self.close()
        print()
        say(f"{event.error} in {event.place}:")
        say(event.text)


def summary(outcome: Outcome) -> None:
    """Print how far the gradients are off, and the most that a backward left gathered."""
    started = outcome.started
    print()
    if outcome.difference is not None:
        _pair("largest gradient difference to PyTorch", _small(outcome.difference))
    for backward, name in ((1, "first (retained)"), (2, "second")):
        most = outcome.most_gathered(backward)
        if started is None or most is None:
            continue
        _pair(
            f"gathered after the {name} backward",
            f"{most.parameters} of {started.parameters} parameters, {most.bytes:,} bytes",
        )


def _pair(what: str, value: str) -> None:
    print(f"{_INDENT}{what:<46}{value}", flush=True)


def table(stock: Outcome, patched: Outcome) -> None:
    """Print both runs side by side."""
    # The words of an error need room, on whichever side there is one.
    widths = (32, 31, 13) if patched.failed is None else (32, 22, 22)
    rows = [("", "stock", "patched")]
    rows += zip(_LABELS, _cells(stock), _cells(patched), strict=True)
    for row in rows:
        wrapped = (textwrap.wrap(text, width) for text, width in zip(row, widths, strict=True))
        for line in zip_longest(*wrapped, fillvalue=""):
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())
    sys.stdout.flush()


def verdict(patched: Outcome) -> int:
    """Print what is wrong, or how to use it; returns the exit code."""
    faults = patched.faults()
    print()
    for fault in faults:
        print(f"FAILED, the patched run: {fault}")
    if not faults:
        print("Use it: import ds_patches; ds_patches.apply_all() above deepspeed.initialize")
    sys.stdout.flush()
    return int(bool(faults))


_LABELS = (
    "trains",
    "error",
    "gradient difference to PyTorch",
    "gathered after retained backward",
    "test accuracy",
    "seconds per epoch",
)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    gathered, seconds = outcome.most_gathered(1), outcome.seconds_per_epoch
    return (
        "yes" if outcome.trained else "no",
        outcome.failed.text if outcome.failed else "none",
        _small(outcome.difference),
        f"{gathered.parameters} of {outcome.started.parameters}"
        if gathered and outcome.started
        else _NONE,
        f"{outcome.evaluated[-1].accuracy:.1%}" if outcome.trained else _NONE,
        f"{seconds:.2f}" if seconds is not None else _NONE,
    )


def _small(difference: float | None) -> str:
    return _NONE if difference is None else f"{difference:.1e}"
