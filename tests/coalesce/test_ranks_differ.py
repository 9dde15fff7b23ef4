"""ZeRO 3: in a block, ranks take different ways through the model, as PyTorch's would."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import Options, World, check
from tests.harness.cases import checked, of
from tests.models import zoo
from tests.scripts.windows import window

ROUTED = ["Routed", "RoutedTwice", "RoutedUnevenly", "RoutedNonReentrant", "RoutedReentrant"]
#: DeepSpeed keeps small parameters gathered by default.
SETTINGS: list[dict[str, Any]] = [{}, {"stage3_param_persistence_threshold": 40}]

test_each_rank_uses_other_experts = checked(
    *(
        of("coalesce", window, 3, core={3} - {3 * bool(zero)}, model="Routed", zero=zero)
        for zero in SETTINGS
    ),
    *(of("coalesce zero3_retain", window, 3, model=model) for model in ROUTED),
)


def a_picture_on_one_rank(trainer: Any, step: int) -> None:
    """Another rank has it in each forward; without one, nothing of the tower is used."""
    with trainer.window():
        for part in range(2):
            seed = 100 * step + 10 * part + dist.get_rank()
            batch = zoo.batch("LLaVA" if seed % 2 == part else "Llama", seed)
            trainer.backward(trainer(**batch).loss)


@pytest.mark.core_case
def test_one_rank_uses_a_tower(world: World) -> None:
    options = Options(stage=3, model=partial(zoo.build, "LLaVA"))  # type: ignore[arg-type]
    check(world, a_picture_on_one_rank, options, "coalesce", "zero3_retain", strict=False)
