"""Several backwards over one forward that DeepSpeed's own checkpointing recomputes."""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
