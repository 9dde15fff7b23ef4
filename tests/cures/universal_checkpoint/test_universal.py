"""A parameter's weights and states, read and set after a universal checkpoint was loaded."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.harness import ADAM, BF16, BF16_SUMS, EngineTrainer, Given, applied, engine_trainer
from tests.harness.models import loss_of
from tests.harness.stock import RELEASE, Version, up_to
from tests.world import on_ranks


def trained(options: Given, folder: Path) -> EngineTrainer:
    """One step from where plain PyTorch begins."""
    trainer = engine_trainer(folder=folder, **options)
    trainer.backward(loss_of(trainer, 0))
    trainer.step()
    return trainer


def convert(folder: Path) -> None:
    """Convert as the program ``ds_to_universal.py`` does, on one rank."""
    from deepspeed.checkpoint import ds_to_universal

    if dist.get_rank() == 0:
        ds_to_universal._do_parallel_work = lambda do, files, workers: [do(file) for file in files]
        ds_to_universal.main(
            SimpleNamespace(
                input_folder=str(folder / "here"),
                output_folder=str(folder / "universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    dist.barrier()


#: bf16 with fp32 sums was another optimizer's then, which loads none of these.
LOADS_SUMS = not Version("0.17.6") <= RELEASE <= Version("0.18.4")


@on_ranks
@pytest.mark.core_case(options={"stage": 1, **ADAM}, patch=True)
@pytest.mark.core_case(options={"stage": 2, **ADAM, **BF16}, patch=True)
@up_to("0.19.6")
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, **ADAM},
        {"stage": 2, **ADAM, **BF16},
        *[{"stage": 1, **ADAM, **BF16_SUMS}] * LOADS_SUMS,
    ],
    ids=str,
)
def test_what_is_read_and_set(tmp_path: Path, options: Given, patch: bool) -> None:
    from deepspeed import utils

    first = trained(options, tmp_path)
    first.save()
    convert(tmp_path)
    options = {**options, "settings": {**ADAM["settings"], "checkpoint": {"load_universal": True}}}
    second = trained(options, tmp_path)
    with applied(*["universal_checkpoint"] * patch):
        second.engine.load_checkpoint(str(tmp_path), tag="universal")
    pairs = [*zip(first.module.parameters(), second.module.parameters(), strict=True)]
    reads = [
        torch.equal(*map(utils.safe_get_full_fp32_param, pair))
        and torch.equal(*(utils.safe_get_full_optimizer_state(param, "exp_avg") for param in pair))
        for pair in pairs
    ]
    assert all(reads) == patch
    for pair in pairs:
        for param in pair:
            utils.safe_set_full_fp32_param(param, torch.ones_like(param, dtype=torch.float32))
            state = torch.zeros_like(param, dtype=torch.float32)
            utils.safe_set_full_optimizer_state(param, state, "exp_avg")
    for trainer in (first, second):
        trainer.backward(loss_of(trainer, 1))
        trainer.step()
    assert all(torch.equal(*pair) for pair in pairs) == patch
