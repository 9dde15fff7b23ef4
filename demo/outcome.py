"""What became of one run, and whether it is good."""

from __future__ import annotations

from dataclasses import dataclass, field

from demo.events import Compared, Evaluated, Event, Failed, Gathered, Started

ROUNDING = 1e-5  # float32, two ranks, sums in another order


@dataclass
class Outcome:
    """All that the ranks of one run reported."""

    epochs: int
    started: Started | None = None
    failed: Failed | None = None
    evaluated: list[Evaluated] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    gathered: dict[int, list[Gathered]] = field(default_factory=lambda: {1: [], 2: []})

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Failed():
                self.failed = self.failed or event  # the others fail because the first did
            case Evaluated():
                self.evaluated.append(event)
            case Compared():
                self.differences.append(event.difference)
            case Gathered():
                self.gathered[event.backward].append(event)

    @property
    def trained(self) -> bool:
        """Whether all epochs ran, both losses fell and most test images are read rightly."""
        if self.failed or len(self.evaluated) != self.epochs + 1:
            return False
        before, after = self.evaluated[0], self.evaluated[-1]
        return (
            after.digit_loss < before.digit_loss
            and after.pixel_loss < before.pixel_loss
            and after.accuracy > 0.5
        )

    @property
    def difference(self) -> float | None:
        """The worst difference to PyTorch's gradient; NaN is worst of all."""
        return max(self.differences, key=lambda d: (d != d, d), default=None)

    def most_gathered(self, backward: int) -> Gathered | None:
        """The most that a first or second backward left gathered, over all steps and ranks."""
        return max(self.gathered[backward], key=lambda g: (g.bytes, g.parameters), default=None)

    @property
    def seconds_per_epoch(self) -> float | None:
        seconds = [e.seconds for e in self.evaluated[1:]]
        return sum(seconds) / len(seconds) if seconds else None

    def faults(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        found = []
        if not self.trained:
            found.append("it did not train")
        if self.difference is None:
            found.append("its gradients were never compared")
        elif not self.difference <= ROUNDING:  # NaN too
            found.append(f"its gradients are not PyTorch's to {ROUNDING:g}")
        for backward, name in ((1, "retained"), (2, "last")):
            most = self.most_gathered(backward)
            if most is None:
                found.append(f"no {name} backward came to its end")
            elif most.parameters > 0:
                found.append(f"parameters stay gathered after the {name} backward")
        return found
