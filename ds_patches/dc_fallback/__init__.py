"""DeepCompile ZeRO-3 with frames that Dynamo skips: they gather, and they train."""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
