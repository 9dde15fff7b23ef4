"""`import ds_patches.auto` applies the patches, as `ds_patches.apply_all()` does."""

from ds_patches.core.api import apply_all

apply_all()
