"""Gradients of a step add up, as in PyTorch."""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
