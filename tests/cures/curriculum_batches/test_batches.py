"""Batches of a curriculum are as large as the configuration says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import applied, config, models
from tests.world import on_ranks

PATCH = "curriculum_batches"
MICRO = 4
#: Samples of difficulty 1, 2 and 3.
BATCHES, SAMPLES = 3, [range(3), range(3, 7), range(7, 47)]


def written(path: Path, rows: Sequence[Sequence[int]]) -> str:
    """Only the first rank reads what it has written."""
    from deepspeed.runtime.data_pipeline.data_sampling import utils

    if dist.get_rank() == 0:
        path.parent.mkdir(exist_ok=True)
        builder = utils.create_mmap_dataset_builder(str(path), np.int64)
        for row in rows:
            builder.add_item_numpy(np.array(row, dtype=np.int64))
        utils.close_mmap_dataset_builder(builder, str(path))
    return str(path)


def batches(folder: Path, *patches: str, least: int = 1) -> list[list[int]]:
    """The samples of this rank: those of a difficulty of `least` at first."""
    import deepspeed

    metric = {
        "index_to_sample_path": written(folder / "samples", SAMPLES),
        "index_to_metric_path": written(folder / "metric", [[1], [2], [3]]),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": least,
        "max_difficulty": 3,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 1},
    }
    curriculum = {"enabled": True, "data_cluster_path": str(folder / "clusters")}
    sampling = {"curriculum_learning": {**curriculum, "curriculum_metrics": {"one": metric}}}
    settings = {
        **config(0),
        "train_micro_batch_size_per_gpu": MICRO,
        "dataloader_drop_last": False,
        "data_efficiency": {
            "enabled": True,
            "seed": 1,
            "data_sampling": {"enabled": True, "num_epochs": 9, **sampling},
        },
    }
    with applied(*patches):
        model = models.build("TwoHeads")
        _, _, loader, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            training_data=[*range(47)],
            config=settings,
        )
        samples: Any = iter(loader)
        return [next(samples).tolist() for _ in range(BATCHES)]


@on_ranks
@pytest.mark.core_case
def test_a_cluster_smaller_than_a_batch(tmp_path: Path) -> None:
    stock, patched = batches(tmp_path / "stock"), batches(tmp_path / "patched", PATCH)
    assert max(map(len, stock)) < MICRO
    assert [*map(len, patched)] == [MICRO] * BATCHES
    assert {sample for batch in patched for sample in batch} <= {*SAMPLES[0]}


@on_ranks
def test_large_clusters_are_drawn_from_as_on_stock(tmp_path: Path) -> None:
    patched = batches(tmp_path / "patched", PATCH, least=3)
    assert patched == batches(tmp_path / "stock", least=3)
