"""Training goes on after inference mode and generation; several dtypes are gathered together."""

from typing import Any

import pytest
import torch
from torch import nn

from ds_patches.cures import zero3_hooks
from tests.harness import SMALL_PREFETCH, applied, build_engine, check, config, models, run, stock
from tests.harness.models import WIDTH, batch
from tests.harness.trainers import engine_trainer
from tests.scripts import evaluating
from tests.scripts.worlds import FRUGAL
from tests.world import World, on_ranks

#: All are gathered as if they had the dtype of the first (issue 8072).
TAKES_THE_FIRST = stock.Version("0.19.3") > stock.RELEASE


@pytest.mark.core_case
@pytest.mark.parametrize(
    ("script", "zero"),
    [
        (evaluating.inference_mode, SMALL_PREFETCH),
        (evaluating.inference_mode_of_the_module, SMALL_PREFETCH),
        (evaluating.inference_mode_first, FRUGAL),
        # Hooks are removed and added again, as TRL and Accelerate do.
        (evaluating.generation_without_hooks, {}),
        (evaluating.generation_of_the_root, {}),
    ],
)
def test_training_goes_on(world: World, script: Any, zero: dict[str, Any]) -> None:
    check(world, script, script.at(3, steps=3, zero=zero), "zero3_hooks")


@stock.up_to("0.19.1")
def test_stock_keeps_a_trace_of_old_numbers(world: World) -> None:
    """As the modules are registered again (pull request 8043)."""
    script = evaluating.generation_without_hooks
    for outcome in world.run(run, script, script.at(3, steps=3)):
        assert "pop from an empty deque" in outcome.error


@on_ranks
@pytest.mark.parametrize("threshold", [0, 300])
@pytest.mark.parametrize("what", ["the model", "a part", "a gather by hand"])
def test_no_parameter_becomes_an_inference_tensor(what: str, threshold: int) -> None:
    settings = SMALL_PREFETCH | {"stage3_param_persistence_threshold": threshold}
    with applied("zero3_hooks"):
        trainer = engine_trainer(zero=settings)
        params = [*trainer.module.parameters()]
        for _ in range(3):
            with torch.inference_mode():
                if what == "the model":
                    trainer(batch(0)[0])
                elif what == "a part":
                    trainer.module.blocks[1](torch.ones(2, models.WIDTH))
                else:
                    with trainer.gathered(params):
                        sum(param.sum() for param in params)
            assert not any(param.is_inference() for param in params)


def test_what_deepspeed_changes_there_has_no_gradient() -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        before = modes()
        assert zero3_hooks.around_change(modes, None, (), {}) == (False, False)
        assert modes() == before


class Mixed(nn.Module):
    """A base of one dtype, and an adapter of another."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False).bfloat16()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


def are_gathered_together(*patches: str) -> bool:
    from deepspeed.runtime.zero import GatheredParameters

    model = Mixed()
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    with applied(*patches):
        engine = build_engine(model, config(3))
        try:
            with GatheredParameters(list(engine.module.parameters())):
                gathered = dict(engine.module.named_parameters())
                return all(gathered[name].equal(value) for name, value in wanted.items())
        except Exception:
            return False


@on_ranks
@pytest.mark.core_case
def test_several_dtypes_are_gathered_together() -> None:
    assert are_gathered_together() != TAKES_THE_FIRST
    assert are_gathered_together("zero3_hooks")
