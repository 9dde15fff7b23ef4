"""C2: a last backward that is announced reduces its buckets while it runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.coalesce import cases, flat, releases
from tests.world import World
from tests.zero3_retain import models

SMALL_BUCKETS = {"zero": {"overlap_comm": True, "reduce_bucket_size": 200}}


def announcing(trainer: Any, how: str, sent: list[int]) -> None:
    """Windows that announce their last backward, on the ranks that `how` says.

    sent: takes, per backward, how many reductions it started.
    """
    rank = dist.get_rank() if isinstance(trainer, cases.EngineTrainer) else 0
    announces = "alone" not in how or rank == 0
    by_number = announces and "number" in how
    for step in range(3):
        with trainer.window(**({"num_backwards": cases.BACKWARDS} if by_number else {})):
            for index in range(cases.BACKWARDS):
                if announces and "boundary" in how and isinstance(trainer, cases.EngineTrainer):
                    last = index == cases.BACKWARDS - 1
                    trainer.engine.set_gradient_accumulation_boundary(last)
                tokens, classes = models.batch(step, index)
                loss = sum(models.losses(trainer.forward(tokens), classes))
                with flat.Traffic() as traffic:
                    trainer.backward(loss)
                sent.append(len(traffic.seen))
        trainer.step()


def outcome(how: str, stage: int, model: str, style: str) -> tuple[cases.Outcome, list[int]]:
    sent: list[int] = []

    def script(trainer: Any) -> None:
        sent.clear()
        announcing(trainer, how, sent)

    start = models.build(getattr(models, model))
    found = cases.run(script, start, stage, style=style, settings=SMALL_BUCKETS)
    return found, sent[: cases.BACKWARDS]


@pytest.mark.exhaustive
@pytest.mark.core_case(style="engine", model="TwoHeads", how="by number")
@pytest.mark.parametrize(
    ("how", "model", "style"),
    [
        ("by number", "TwoHeads", "engine"),
        ("by number", "TwoHeads", "torch"),
        ("by boundary", "TwoHeads", "engine"),
        ("by boundary", "TwoHeads", "torch"),
        ("by number", "FrozenTrunk", "engine"),
        ("by number", "TiedEmbedding", "engine"),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_reductions_run_beside_the_last_backward(
    world: World, stage: int, how: str, model: str, style: str
) -> None:
    releases.needs_torch_style(style)
    in_time = []
    for result, (*before, last) in world.run(outcome, how, stage, model, style):
        assert result.equal(), result
        assert not any(before)
        in_time.append(last)
    # A rank that is ahead of the other does not wait for it in its backward.
    assert max(in_time) > 1


@pytest.mark.parametrize("how", ["by number, alone", "by boundary, alone"])
def test_one_rank_alone_announces(world: World, how: str) -> None:
    """Then nothing is sent before the end, and the sum is right all the same."""
    for result, sent in world.within(60).run(outcome, how, 2, "TwoHeads", "engine"):
        assert result.equal(), result
        assert not any(sent)


@pytest.mark.parametrize("how", ["by number", "by boundary"])
def test_at_stage_3_it_changes_nothing(world: World, how: str) -> None:
    for result, sent in world.run(outcome, how, 3, "TwoHeads", "engine"):
        assert result.equal(), result
        assert not any(sent)


def one_more(stage: int, boundaries: tuple[bool, ...]) -> str:
    """The error of the last of these backwards."""
    from tests.zero3_retain import trainers

    with cases.patched():
        start = models.build(models.TwoHeads)
        engine = trainers.build_engine(start, trainers.config(stage))
        try:
            with engine.coalesce_grad_reduction():
                for boundary in boundaries:
                    engine.set_gradient_accumulation_boundary(boundary)
                    tokens, classes = models.batch(0)
                    engine.backward(sum(models.losses(engine(tokens), classes)))
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("boundaries", "refused"),
    [
        ((False, True, False), True),
        ((False, True, True), True),
        ((False, False, True), False),
        ((True, True), False),  # set for good, as many do
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_after_the_last_one(
    world: World, stage: int, boundaries: tuple[bool, ...], refused: bool
) -> None:
    for text in world.within(60).run(one_more, stage, boundaries):
        assert ("this is one more" in text) == refused, text


def with_handshake(kind: str) -> cases.Outcome:
    script = partial(cases.several_backwards, num_backwards=cases.BACKWARDS)
    return cases.run(script, models.build(models.TwoHeads), 2, handshake=kind)


@pytest.mark.parametrize("kind", ["on", "store", "off"])
def test_ways_to_meet(world: World, kind: str) -> None:
    for result in world.run(with_handshake, kind):
        assert result.equal(), result
