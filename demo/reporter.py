"""How a rank tells the process that started it what happens."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from demo.events import Event, Warned


class Reporter:
    """Sends what happens on this rank; `place` says how far it came."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.place = "start"
        self._events = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def send(self, event: Event) -> None:
        """Report something of this rank's own."""
        pickle.dump(event, self._events)
        self._events.flush()

    def tell(self, event: Event) -> None:
        """Report something that all ranks know alike: the first does."""
        if self.rank == 0:
            self.send(event)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Narrow `place` down to `what`; an exception leaves it there."""
        outside = self.place
        self.place = f"{outside}, {what}"
        yield
        self.place = outside


class WarningReporter(logging.Handler):
    """Reports the warnings of ds_patches, which are meant to be seen."""

    def __init__(self, report: Reporter) -> None:
        super().__init__(logging.WARNING)
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        self.report.send(Warned(record.getMessage()))
