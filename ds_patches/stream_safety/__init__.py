"""ZeRO gradients that cross CUDA streams under overlap_comm, without races."""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
