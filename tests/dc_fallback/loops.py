"""A pattern trained under DeepCompile, with the patch, and by plain PyTorch, held together."""

from functools import partial
from typing import Any

import torch

from tests.dc_fallback.patterns import inputs
from tests.harness import DEEPCOMPILE, Options, Outcome, Script, World, applied, check

EXACT = 2e-6
patched = partial(applied, "dc_fallback")


def loop(
    trainer: Any, step: int, micro: int, *, forwards: int = 1, evaluates: bool = False
) -> None:
    """`forwards`: how many come before one backward over their sum.

    evaluates: a forward without gradients comes before, and one that no backward follows.
    """
    if evaluates:
        with torch.no_grad():
            trainer(*inputs(step, 7))
        trainer(*inputs(step, 8))
    losses = [trainer(*inputs(step, 3 * micro + part)) for part in range(forwards)]
    trainer.backward(sum(losses[1:], losses[0]))


def trains(
    world: World,
    pattern: str,
    script: Script = loop,
    compiles: dict[str, Any] | None = None,
    *,
    patches: tuple[str, ...] = ("dc_fallback",),
    strict: bool = True,
    **options: Any,
) -> Outcome:
    """As plain PyTorch does, every parameter, and nothing stays gathered.

    compiles: of `stand_in.deep_compile`.
    """
    training = Options(model=f"patterns.{pattern}", **options)
    how = {"on": DEEPCOMPILE, "tolerance": EXACT, "strict": strict, "compiles": compiles}
    outcomes = check(world, script, training, *patches, quiet=False, **how)
    for outcome in outcomes:
        assert not outcome.untrained, outcome
        assert not any(outcome.available), "a parameter stayed gathered"
    return outcomes[0]
