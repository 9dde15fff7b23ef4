"""What a rank reports while it trains. Plain values: neither torch nor DeepSpeed is needed here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patched:
    """`ds_patches.apply_all()` returned; one line per patch."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Warned:
    """ds_patches logged a warning."""

    text: str


@dataclass(frozen=True)
class Started:
    """The engine is built; sizes are those of the whole model."""

    parameters: int
    bytes: int
    steps: int  # per epoch


@dataclass(frozen=True)
class Gathered:
    """What a backward (the first or second over its forward) left gathered on this rank."""

    backward: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Compared:
    """Largest difference to PyTorch's gradient, relative to the largest gradient."""

    difference: float


@dataclass(frozen=True)
class Stepped:
    """The optimizer has run."""


@dataclass(frozen=True)
class Evaluated:
    """The test images after an epoch; epoch 0 is before training, and took no time."""

    epoch: int
    digit_loss: float
    pixel_loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Training raised: where, which exception, and its own words."""

    place: str
    error: str
    text: str


@dataclass(frozen=True)
class Finished:
    """All epochs are done."""


Event = Patched | Warned | Started | Gathered | Compared | Stepped | Evaluated | Failed | Finished
