"""Small models, and batches for them; built from a seed, so that two instances are equal."""
# ruff: noqa: F403

from typing import Any

import torch
from torch import nn

from tests.harness.models.batches import *
from tests.harness.models.batches import device
from tests.harness.models.raising import *
from tests.harness.models.shapes import *
from tests.harness.models.variants import *


def build(model: str | type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model from a fixed seed, where DeepSpeed trains.

    model: of those above, or ``patterns.*`` of dc_fallback's, or that for streams.
    """
    if model == "streams":
        from tests.stream_safety import on_streams

        return on_streams.model()
    if isinstance(model, str) and model.startswith("patterns."):
        from tests.dc_fallback import patterns

        return patterns.build(model.removeprefix("patterns."))
    torch.manual_seed(7)
    kind: Any = globals()[model] if isinstance(model, str) else model
    made: nn.Module = kind().to(device(), dtype)
    return made
