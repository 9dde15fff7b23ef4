"""A gradient is divided by the micro steps once, whichever outputs it passes on its way."""

from functools import partial
from typing import Any

from tests.harness import applied, at, checked, engine_of, listening, of, trains
from tests.harness.models import batch, loss_of
from tests.harness.models.batches import losses
from tests.harness.options import BF16, OFFLOADED
from tests.world import on_ranks

accumulation = partial(of, "accumulation")
leading = partial(accumulation, model="LeadingToEachOther", micro_steps=4)


def outputs_of(trainer: Any, step: int, micro: int) -> Any:
    return trainer(*batch(step, micro))


def of_the_model(trainer: Any, step: int, micro: int) -> None:
    """``engine(input_ids, labels=labels).loss``"""
    trainer.backward(outputs_of(trainer, step, micro)["loss"])


def of_several(trainer: Any, step: int, micro: int) -> None:
    """The model's loss, a second head, and penalties on what leads to them."""
    outputs = outputs_of(trainer, step, micro)
    logits, hidden, others = outputs["rest"]
    parts = (logits, hidden[0].sin(), hidden[1], *others)
    trainer.backward(outputs["loss"] + sum(part.float().square().mean() for part in parts))


test_outputs_that_lead_to_one_another = checked(
    leading(of_the_model, 2, core={2}),
    leading(of_several, 0, 1, 2, 3, core={0}),
    # DeepSpeed refuses plain backwards without ZeRO
    *(leading(of_several, 1, 2, 3, style=style) for style in ("scale", "torch")),
    leading(of_several, 2, 3, **BF16),
    of(
        "accumulation half_without_zero",
        of_several,
        0,
        model="LeadingToEachOther",
        micro_steps=4,
        **BF16,
    ),
)


@trains(
    "accumulation",
    at(1, 2, 3, micro_steps=2, style="torch", model="InADataclass"),
    at(2, micro_steps=2, model="InADataclass"),
)
def test_outputs_in_a_plain_dataclass(trainer: Any, step: int, micro: int) -> None:
    """Where DeepSpeed does not look for them; stock raises a KeyError."""
    tokens, classes = batch(step, micro)
    outputs = trainer(tokens)
    trainer.backward(sum(losses((outputs.logits, outputs.rebuilt), classes)))


# --- Another number of micro steps ----------------------------------------------------------------


def resized(trainer: Any, counts: tuple[int, ...]) -> None:
    for step in trainer.steps():
        if step and counts[step] != counts[step - 1]:
            trainer.resize(counts[step])
        for micro in range(counts[step]):
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


smaller = partial(accumulation, partial(resized, counts=(4, 3, 1, 2)), steps=4, micro_steps=4)


test_a_batch_of_another_size = checked(
    smaller(0, 1, 2, 3, core={2}),
    smaller(1, 2, 3, core={2}, **OFFLOADED),
)


@on_ranks
def test_in_the_middle_of_a_step_it_is_said() -> None:
    with applied("accumulation"), listening() as heard:
        engine = engine_of(stage=2, micro_steps=4)
        engine.backward(engine(batch(0)[0])[0].float().sum())
        engine.step()
        engine.set_train_batch_size(2 * engine.train_micro_batch_size_per_gpu() * 3)
        assert any("after 1 micro step(s) of a step" in line for line in heard), heard
