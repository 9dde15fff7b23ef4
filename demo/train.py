"""The training script. Stock or patched, it is the same but for one call."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import deepspeed
import torch

from demo import data, gradients
from demo.data import Digits
from demo.events import Compared, Evaluated, Gathered, Patched, Started, Stepped
from demo.model import TwoHeads, digit_loss, pixel_loss
from demo.reporter import Reporter

_BATCH = 32  # per rank
_CONFIG = {
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # partition the smallest parameter too
        "reduce_bucket_size": 1_000_000,
    },
}


def apply_patches(report: Reporter) -> None:
    """What a user writes above ``deepspeed.initialize``, and the status it returns."""
    import ds_patches

    statuses = ds_patches.apply_all()
    report.tell(Patched(tuple(f"{s.name}: {s.state.value}; {s.reason}" for s in statuses.values())))


class Training:
    """One engine on one rank."""

    def __init__(self, seed: int, report: Reporter) -> None:
        torch.manual_seed(seed)
        self.report = report
        self.shuffle = torch.Generator().manual_seed(seed)  # alike on all ranks
        self.train, self.test = data.load()
        model = TwoHeads()
        self.plain = deepcopy(model)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), config=_CONFIG
        )
        weights = list(self.plain.parameters())
        report.tell(
            Started(
                parameters=len(weights),
                bytes=sum(w.nbytes for w in weights),
                steps=len(self.train.labels) // (_BATCH * report.ranks),
            )
        )

    def run(self, epochs: int) -> None:
        """Train, and test before the first epoch and after each."""
        # On the plain copy, for the stock run's sake: DeepSpeed takes a forward without gradients
        # for one that a backward will follow, and so lets one second backward through: the first
        # step would not crash but get a wrong gradient.
        self.evaluate(self.plain, 0, 0.0)
        for epoch in range(1, epochs + 1):
            seconds = 0.0
            order = torch.randperm(len(self.train.labels), generator=self.shuffle)
            batches = self.train.share(order, _BATCH, self.report.rank, self.report.ranks)
            for number, batch in enumerate(batches, start=1):
                self.report.place = f"epoch {epoch}, step {number}"
                seconds += self.step(batch, compare=number == 1)
            self.evaluate(self.engine, epoch, seconds)

    def step(self, batch: Digits, *, compare: bool) -> float:
        """One forward, two backwards, one step; the seconds it took without the comparison."""
        begun = time.perf_counter()
        logits, pixels = self.engine(batch.images)
        with self.report.during("first backward"):
            self.engine.backward(digit_loss(logits, batch.labels), retain_graph=True)
        self.count_gathered(1)
        with self.report.during("second backward"):
            self.engine.backward(pixel_loss(pixels, batch.images))
        self.count_gathered(2)
        seconds = time.perf_counter() - begun
        if compare:
            self.report.send(Compared(gradients.difference(self.engine, self.plain, batch)))
        begun = time.perf_counter()
        with self.report.during("step"):
            self.engine.step()
        self.report.tell(Stepped())
        return seconds + time.perf_counter() - begun

    def count_gathered(self, backward: int) -> None:
        """Report what is in memory now: a partitioned parameter has an empty tensor."""
        whole = [p for p in self.engine.module.parameters() if p.numel() > 0]
        self.report.send(Gathered(backward, len(whole), sum(p.nbytes for p in whole)))

    @torch.no_grad()
    def evaluate(self, model: Any, epoch: int, seconds: float) -> None:
        """Report both losses and the accuracy on all test images."""
        model.eval()
        logits, pixels = model(self.test.images)
        model.train()
        self.report.tell(
            Evaluated(
                epoch,
                digit_loss(logits, self.test.labels).item(),
                pixel_loss(pixels, self.test.images).item(),
                (logits.argmax(1) == self.test.labels).float().mean().item(),
                seconds,
            )
        )


def train(*, patched: bool, epochs: int, seed: int, report: Reporter) -> None:
    """Train the two-head model for `epochs` and report every step on the way."""
    if patched:
        apply_patches(report)
    Training(seed, report).run(epochs)
