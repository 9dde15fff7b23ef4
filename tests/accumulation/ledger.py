"""Ordinary training loops that releases get wrong: each with where, and from when until when."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.accumulation.cases import OFFLOADED, OVERLAP, Script
from tests.coalesce import micro_steps
from tests.coalesce.micro_steps import one_backward
from tests.training import models

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
SCATTERED = {"zero": {"contiguous_gradients": False}}
NOW = "9"  # it has not ended


class Entry(NamedTuple):
    """A loop, and the releases whose stock is wrong there: from `first` to `last`.

    left: releases from and to which the patch leaves to stock, and says so.
    core: whether it runs on every chosen release.
    """

    id: str
    script: Script
    stage: int
    first: str
    last: str
    micro_steps: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012
    dtype: str = "float32"
    left: tuple[str, str] = ("9", "9")
    core: bool = False

    @property
    def name(self) -> str:
        kinds = {"offload_optimizer": "offloaded", "overlap_comm": "overlap", "bf16": "bf16"}
        named = [name for key, name in kinds.items() if key in str(self.settings)]
        return "-".join([self.id, self.script.__name__, str(self.stage), *named])

    @property
    def case(self) -> dict[str, Any]:
        """How `cases.run` is asked for it."""
        names = ("script", "stage", "micro_steps", "settings", "dtype")
        return {name: getattr(self, name) for name in names}


# --- Scripts that micro_steps has not -------------------------------------------------------------


def each_step(trainer: Any) -> None:
    """One forward, one backward, one step."""
    for step in range(3):
        one_backward(trainer, step)
        trainer.step()


def four_micro_steps(trainer: Any) -> None:
    micro_steps.micro_steps(trainer, 4)


def used_in_the_first_step_only(trainer: Any) -> None:
    """One head has no backward in later steps."""
    for step in range(4):
        one_backward(trainer, step, only=slice(1) if step else slice(2))
        trainer.step()


def used_late(trainer: Any) -> None:
    """One head has its first backward of a step after those of the rest."""
    for step in range(3):
        for index in range(2):
            one_backward(trainer, step, index, slice(index + 1))
            trainer.step()


def other_head_in_each_micro_step(trainer: Any) -> None:
    """What the first micro step trains, the last does not reach."""
    for step in range(2):
        for index in range(2):
            one_backward(trainer, step, index, slice(1 - index, 2 - index))
            trainer.step()


def engine_then_module(trainer: Any) -> None:
    """One micro step calls the engine, the next the model in it."""
    in_turns(trainer, [trainer.forward, trainer.around_the_engine])


def module_then_engine(trainer: Any) -> None:
    in_turns(trainer, [trainer.around_the_engine, trainer.forward])


def in_turns(trainer: Any, forwards: list[Any]) -> None:
    for step in range(3):
        for index, forward in enumerate(forwards):
            tokens, classes = models.batch(step, index)
            trainer.backward(sum(models.losses(forward(tokens), classes)))
            trainer.step()


def scaled_by_the_user(trainer: Any) -> None:
    """``engine.backward(loss, scale_wrt_gas=False)``, as the Trainer of transformers has it."""
    for step in range(3):
        for index in range(2):
            tokens, classes = models.batch(step, index)
            trainer.unscaled_backward(sum(models.losses(trainer(tokens), classes)) / 2)
            trainer.step()


def one_head_then_the_other(trainer: Any) -> None:
    """Three forwards come first; the last one's head still has what the last step left."""
    for step in range(3):
        batches = [models.batch(step, index) for index in range(3)]
        outputs = [(trainer(tokens), classes) for tokens, classes in batches]
        for (output, classes), head in zip(outputs, (0, 0, 1), strict=True):
            trainer.backward(models.losses(output, classes)[head])
        trainer.step()


# --- The ledger -----------------------------------------------------------------------------------

_twice, _two_forwards = micro_steps.twice_at_the_boundary, micro_steps.two_forwards_first
_by_hand, _once_more = micro_steps.by_hand, micro_steps.by_hand_and_on
_counted, _over_one = micro_steps.micro_steps, micro_steps.both_over_one_forward
_once = used_in_the_first_step_only
_offloaded_sums = OFFLOADED | BF16
#: There they are an FP16_UnfusedOptimizer's, which from 0.18.3 on trains nothing.
_UNFUSED = ("0.17.6", "0.18.4")

LEDGER = (
    # Several backwards before one step: only the last counts; 0.17.6 to 0.18.2 crash (PR 7665).
    Entry("A1", _twice, 1, "0.17.6", NOW),
    Entry("A1", _twice, 2, "0.17.6", NOW, core=True),
    Entry("A1", _twice, 2, "0.17.6", NOW, settings=OVERLAP),
    Entry("A1", _two_forwards, 2, "0.17.6", NOW),
    Entry("A1", _two_forwards, 3, "0.18.5", NOW, core=True),
    Entry("A1", _two_forwards, 3, "0.18.5", NOW, settings=OFFLOADED),
    Entry("A1", one_head_then_the_other, 3, "0.16.0", NOW),
    Entry("A1", _once_more, 2, "0.17.6", NOW),
    Entry("A1", _over_one, 1, "0.17.6", NOW),
    # CPU offload: of four micro steps, those in the middle are dropped (PR 7967, issue 6550).
    Entry("A2", four_micro_steps, 2, "0.16.0", "0.18.9", 4, OFFLOADED, core=True),
    # CPU offload: of several backwards at one boundary, only the last counts (PR 7981).
    Entry("A3", _twice, 1, "0.16.0", NOW, settings=OFFLOADED),
    Entry("A3", _twice, 2, "0.16.0", NOW, settings=OFFLOADED, core=True),
    Entry("A3", _by_hand, 2, "0.16.0", "0.18.9", settings=OFFLOADED),
    # Of several micro steps, only the last counts (issue 7718).
    Entry("A4", _counted, 2, "0.17.6", "0.18.2", 2, core=True),
    Entry("A4", _by_hand, 2, "0.17.6", "0.18.2"),
    # A parameter that a step has not used, or not yet, has the last step's gradient.
    Entry("A5", _once, 3, "0.16.0", NOW, core=True),
    Entry("A5", _once, 3, "0.16.0", NOW, settings=OFFLOADED),
    Entry("A5", _once, 2, "0.16.0", NOW, settings=OFFLOADED, core=True),
    Entry("A5", used_late, 3, "0.16.0", NOW, 2),
    Entry("A5", used_late, 2, "0.19.0", NOW, 2, OFFLOADED),
    # A forward of the model in the engine, between those of the engine (issue 8224, PR 8245).
    Entry("A6", engine_then_module, 1, "0.18.3", "0.19.5", 2),
    Entry("A6", engine_then_module, 2, "0.18.3", "0.19.5", 2, core=True),
    Entry("A6", engine_then_module, 3, "0.18.3", NOW, 2, core=True),
    Entry("A6", module_then_engine, 2, "0.18.3", "0.19.5", 2),
    Entry("A6", module_then_engine, 3, "0.18.3", "0.19.5", 2),
    # Gradients are divided by the micro steps, though the user has asked for none of it (7724).
    Entry("A7", scaled_by_the_user, 1, "0.18.3", "0.18.3", 2),
    Entry("A7", scaled_by_the_user, 2, "0.18.3", "0.18.3", 2, core=True),
    Entry("A7", scaled_by_the_user, 3, "0.18.3", "0.18.3", 2),
    # fp32 sums of a bf16 model: the boundary's micro step is not averaged (PR 7985).
    Entry("A8", _counted, 1, "0.18.3", "0.18.9", 2, BF16, "bfloat16", _UNFUSED),
    Entry("A8", each_step, 1, "0.18.3", "0.18.9", 1, BF16, "bfloat16", _UNFUSED, core=True),
    # The same with CPU offload: nothing is.
    Entry("A9", each_step, 1, "0.16.0", "0.19.7", 1, _offloaded_sums, "bfloat16", core=True),
    # overlap_comm: what the last micro step does not reach is lost.
    Entry("A10", other_head_in_each_micro_step, 1, "0.16.0", NOW, 2, OVERLAP, core=True),
    # Gradients that are not copied into one buffer: nothing is reduced on CPU (PR 8382).
    Entry("A11", each_step, 1, "0.16.0", "0.19.7", settings=SCATTERED),
    Entry("A11", each_step, 2, "0.16.0", "0.19.7", settings=SCATTERED, core=True),
)
