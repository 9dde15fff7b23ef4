"""Full curriculum batches, also from clusters that are smaller than a batch."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, upstream

_SAMPLER = Class(
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler", "DeepSpeedDataSampler"
)

PATCH = Patch(
    name="curriculum_batches",
    summary="curriculum batches are full, also from clusters that are smaller than a batch",
    remove_when="a DeepSpeed release fills curriculum batches; none up to 0.19.8 does",
    upstream=upstream("PR 8520"),
    supported=">=0.16.0,<=0.19.8",
    targets=(_SAMPLER.target("get_sample_from_cluster", "around_samples"),),
    collectives=False,
)

apply, unapply, is_applied = api.of(__name__)


def around_samples(wrapped: Wrapped, sampler: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return all requested samples; DeepSpeed returns too few from a small cluster."""
    cluster, num_samples = in_order(wrapped, args, kwargs)
    size = sampler.data_cluster_sizes[cluster]
    samples: list[Any] = []
    while len(samples) < num_samples:
        samples += wrapped(cluster, min(size, num_samples - len(samples)))
    return samples
