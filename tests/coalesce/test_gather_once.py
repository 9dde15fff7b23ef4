"""A block that gathers each parameter once: how often, how much lives, and what scripts may do."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ds_patches.steps.gather_once import suspend
from tests.harness import applied, models, on_ranks
from tests.harness.models import loss_of
from tests.harness.options import NO_REUSE, PERSISTENT, SMALL_PREFETCH, Options
from tests.harness.trainers import Parameters, engine_trainer, worst_difference

Given = dict[str, Any]
MODELS = ["FrozenTrunk", "TiedEmbedding", "SharedBlock", "LeafModule", "Reentrant", "NonReentrant"]


def limited(elements: int, **zero: Any) -> Given:
    return {"zero": {"stage3_max_live_parameters": elements, **zero}}


class Gathers:
    """How often each parameter is gathered, and the most elements that are where modules begin."""

    def __init__(self, trainer: Any) -> None:
        engine = trainer.engine
        self.params = dict(engine.module.named_parameters())
        self.begin()
        for param in self.params.values():
            param.all_gather_coalesced = partial(self._gather, param.all_gather_coalesced)
        for module in engine.module.modules():
            for register in (module.register_forward_pre_hook, module.register_full_backward_hook):
                register(self._look)
        trainer.note()

    def begin(self) -> None:
        self.counts: Counter[str] = Counter()
        self.most = 0

    def _gather(self, wrapped: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        gathered = {id(param) for param in params}
        self.counts.update(name for name, param in self.params.items() if id(param) in gathered)
        return wrapped(params, *args, **kwargs)

    def _look(self, *_: Any) -> None:
        whole = (p for p in self.params.values() if p.ds_status.name != "NOT_AVAILABLE")
        self.most = max(self.most, sum(param.ds_numel for param in whole))


def seen(
    patched: bool, backwards: int, options: Options, blocks: tuple[int, ...] = (0, 1, 2, 3)
) -> list[tuple[Counter[str], int]]:
    """Return the gathers and the most elements of each step; patched, some have `blocks`."""
    used = mock.patch.object(models.Either, "used", (True, False))
    with applied("coalesce") if patched else nullcontext(), used:
        trainer = engine_trainer(models.build(options.model), stage=3, zero=options.zero)
        gathers, seen_steps = Gathers(trainer), []
        for step in range(options.steps):
            gathers.begin()
            with trainer.window() if patched and step in blocks else nullcontext():
                for micro in range(backwards):
                    trainer.backward(loss_of(trainer, step, micro))
            seen_steps.append((gathers.counts, gathers.most))
            trainer.step()
        return seen_steps


@on_ranks
@pytest.mark.core_case(model="TwoHeads")
@pytest.mark.parametrize("model", ["TwoHeads", *MODELS])
def test_what_fits_is_gathered_once(model: str) -> None:
    """And never more than is allowed to live."""
    params = dict(models.build(model).named_parameters())
    most = sum(param.numel() for param in params.values())
    for counts, live in seen(True, 4, Options(model=model, **limited(most))):
        assert counts == dict.fromkeys(params, 1)
        assert live <= most


@on_ranks
@pytest.mark.core_case(model="Uneven", more={})
@pytest.mark.parametrize("more", [{}, NO_REUSE, SMALL_PREFETCH, PERSISTENT], ids=str)
@pytest.mark.parametrize("model", ["Uneven", *MODELS])
def test_a_block_of_one_backward_gathers_no_more_than_stock(model: str, more: Given) -> None:
    stocks, ours = (seen(patched, 1, Options(model=model, zero=more)) for patched in (False, True))
    for (counts, _), (expected, _) in zip(ours, stocks, strict=True):
        assert all(counts[name] <= expected[name] for name in counts), (counts, expected)


@on_ranks
@pytest.mark.core_case
def test_what_does_not_fit_is_gathered_as_ever() -> None:
    """The model has one element too many."""
    elements = sum(param.numel() for param in models.build("TwoHeads").parameters())
    options = Options(**limited(elements - 1, stage3_prefetch_bucket_size=0))
    stocks, ours = (seen(patched, 4, options) for patched in (False, True))
    assert [counts for counts, _ in ours[1:]] == [counts for counts, _ in stocks[1:]]
    assert max(live for _, live in ours) <= max(live for _, live in stocks)
    assert max(ours[-1][0].values()) >= 4


@on_ranks
@pytest.mark.core_case
def test_steps_after_a_block_gather_and_hold_as_ever() -> None:
    """DeepSpeed remembers what it may release, and a block must teach it nothing."""
    options = Options(steps=8, zero=NO_REUSE)
    ours, without = (seen(True, 1, options, blocks) for blocks in ((2, 3), ()))
    assert ours[-3:] == without[-3:]


def test_suspended_hooks_come_back_to_their_places() -> None:
    """Hooks that were removed meanwhile stay removed."""
    calls: list[str] = []
    module = torch.nn.Linear(1, 1)

    def say(word: str) -> Any:
        return module.register_forward_pre_hook(lambda *_: calls.append(word))

    first, _, third, fourth, removed = map(say, "abcdx")
    removed.remove()
    orphan = torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    restore = suspend([first, third, removed, orphan])
    module(torch.ones(1))
    fourth.remove()
    say("e")
    module(torch.ones(1))
    restore()
    module(torch.ones(1))
    assert "".join(calls) == "bd" + "be" + "abce"


def written_inside(by: float, **options: Any) -> Parameters:
    """Where a training ends whose weights change in the middle of its blocks."""
    from deepspeed.runtime.zero import GatheredParameters

    with applied("coalesce"):
        trainer = engine_trainer(stage=3, **options)
        # Not the embedding, which stock up to 0.18.2 has in use from a backward to the step.
        params = list(trainer.module.blocks.parameters())
        for step in trainer.steps():
            with trainer.window():
                for index in range(3):
                    trainer.backward(loss_of(trainer, step, index))
                    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
                        for param in params:
                            param.mul_(by)
            trainer.step()
        return trainer.parameters()


@on_ranks
@pytest.mark.core_case
def test_weights_that_are_written_inside() -> None:
    """As DeepSpeed has it: until the step, which writes its own."""
    ours = written_inside(0.5)
    assert worst_difference(ours, written_inside(0.5, **limited(10)))[0] <= 1e-6
    assert worst_difference(ours, written_inside(1.0))[0] > 1e-3
