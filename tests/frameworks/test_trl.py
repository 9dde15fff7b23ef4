"""DPO and GRPO by TRL at stage 3, with PEFT's LoRA: right on stock, and the same with the patches.

GRPO generates in each step: TRL takes ZeRO's hooks away for that, and has them registered again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import saved
from tests.frameworks.runs import assert_patched, automatic, on_two
from tests.training import trainers
from tests.world import World

for name in ("trl", "peft"):
    pytest.importorskip(name, reason=f"{name} is not installed: it is in the extra `frameworks`")

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_nothing_changes(unpatched: World, patched: World, folder: Path, kind: str) -> None:
    start = saved.save_causal(folder / "model")
    arguments = ("preferences", kind, folder / "model", folder / "output", automatic(3))
    stock, found = (on_two(world, *arguments) for world in (unpatched, patched))
    assert not stock.error
    assert not stock.live
    assert_patched(found)
    assert found.losses == stock.losses
    assert trainers.worst_difference(found.parameters, stock.parameters)[0] == 0
    assert found.reductions == stock.reductions
    adapters = [param for name, param in found.parameters.items() if "lora_B" in name]
    assert len(adapters) == 4
    assert all(param.abs().max() > 0 for param in adapters), "they begin with zeros"
    assert len(found.parameters) == len(start) + 2 * len(adapters)
    assert set(stock.gathers) == {"deepspeed"}
    assert found.gathers == {"ds_patches": stock.gathers.total()}
