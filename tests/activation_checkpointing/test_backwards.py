"""Whatever the stage and the settings, gradients are those of PyTorch's own checkpoint."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.activation_checkpointing import recomputing
from tests.activation_checkpointing.recomputing import NON_REENTRANT, REENTRANT, several
from tests.harness import BF16, Case, Options, World, cases, of, on_ranks, run, stock
from tests.scripts.worlds import FRUGAL

PARTITIONED = {"partition_activations": True}
IN_CPU = {"checkpoint_in_cpu": True}
CONTIGUOUS = PARTITIONED | {"contiguous_checkpointing": True, "num_checkpoints": 2}
SINCE_0_19_6 = stock.since("0.19.6", "a non_reentrant_checkpoint that empties no inputs")


def rows(by: str) -> Iterator[list[Any]]:
    def row(how: dict[str, Any], *stages: int, patches: str = "", **options: Any) -> list[Any]:
        patches += " zero3_retain activation_checkpointing"
        script = partial(several, by=by, **how)
        return of(patches, script, *stages, **{"model": recomputing.Recomputed, **options})

    for count in (1, 2, 3):
        yield row({"backwards": count}, 0, 1, 2, 3, core={2, 3})
        yield row({"backwards": count}, 0, 1, 2, 3, micro_steps=2)
    for count in (1, 2):
        for zero in ({}, {"zero": FRUGAL}):
            yield row({"backwards": count}, 3, model=recomputing.Adapted, **zero)
        for more in (BF16, {"zero": FRUGAL}):
            yield row({"backwards": count}, 3, **more)
        yield row({"backwards": count, "block": True}, 1, 2, 3, patches="coalesce")
    yield row({"fails": True}, 1, 2, 3)
    marks = [SINCE_0_19_6] if by == NON_REENTRANT else []
    yield row(PARTITIONED | IN_CPU, 1, 2, 3, core={3}, marks=marks)
    for settings in (PARTITIONED, IN_CPU, CONTIGUOUS, {"fails": True, **PARTITIONED}):
        yield row(settings, 1, 2, 3, marks=marks)


@cases(*rows(REENTRANT), *rows(NON_REENTRANT))
def test_gradients(world: World, case: Case) -> None:
    fails = "fails" in case.name
    for outcome in case.check(world, says=None if fails else ()):
        gathers_once = "block" in case.name
        assert fails or gathers_once or not any(outcome.available), outcome


@on_ranks
def test_stock_recomputes_with_empty_parameters() -> None:
    script = partial(several, by=NON_REENTRANT)
    outcome = run(script, Options(model=recomputing.Recomputed))
    assert "The size of tensor a (0)" in outcome.error, "stock is right"
