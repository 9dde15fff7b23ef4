"""The rows of the benchmark's table."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.retain import styles
from benchmarks.retain.styles import StyledStep

LOSSES = 2


@dataclass(frozen=True)
class Row:
    """One way to train. `summed`: the losses whose gradients its optimizer step should see."""

    number: int
    title: str
    patched: bool
    step: StyledStep
    summed: tuple[int, ...]
    backwards: int = LOSSES
    holds_all: bool = False  # every parameter persistent: what a backward costs without gathers
    crash: str = ""  # what upstream says when it fails, as it should: recorded, not timed

    @property
    def last_backward(self) -> str:
        return styles.backward_phase(self.backwards)


_STOCK, _PATCHED = False, True
_FIRST, _LAST, _ALL = (0,), (LOSSES - 1,), tuple(range(LOSSES))

_BY_ENGINE = styles.one_forward(styles.engine_backward, zero_grad=True)
_BY_SCALE = styles.one_forward(styles.scaled_backward, zero_grad=True)
_PLAIN = styles.one_forward(styles.plain_backward, zero_grad=True)
_SUM = styles.one_forward(styles.engine_backward, zero_grad=False)

ROWS = {
    row.number: row
    for row in (
        Row(1, "stock, ordinary step, K=1", _STOCK, styles.ordinary, _FIRST, backwards=1),
        Row(2, "patched, ordinary step, K=1", _PATCHED, styles.ordinary, _FIRST, backwards=1),
        Row(
            3, "stock, K=2", _STOCK, _BY_ENGINE, _LAST, crash="The size of tensor a (0) must match"
        ),
        Row(4, "patched, K=2, engine.backward", _PATCHED, _BY_ENGINE, _LAST),
        Row(5, "patched, K=2, engine.scale(l).backward", _PATCHED, _BY_SCALE, _LAST),
        Row(6, "patched, K=2, l.backward", _PATCHED, _PLAIN, _LAST),
        Row(7, "patched, K=2, sum without zero_grad", _PATCHED, _SUM, _ALL),
        Row(8, "stock, K=2 by two forwards, sum", _STOCK, styles.a_forward_each, _ALL),
        Row(
            9,
            "stock, all persistent, K=1",
            _STOCK,
            styles.ordinary,
            _FIRST,
            backwards=1,
            holds_all=True,
        ),
        Row(10, "stock, all persistent, K=2", _STOCK, _BY_ENGINE, _LAST, holds_all=True),
    )
}

# Rows that share an engine and take turns on it, so that their ratios know no drift.
TURNS = (tuple(ROWS[number] for number in (1, 2, 4, 5, 6, 7, 8)), (ROWS[9], ROWS[10]))
CRASH = ROWS[3]
