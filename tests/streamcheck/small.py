"""The training of the stream check, small enough for a CPU."""

from __future__ import annotations

import torch

from ds_patches.streamcheck.training import Work

WORK = Work(widths=(8, 12, 10, 16, 14), rows=(3, 5, 4, 2), micro_batches=3, batches=2)
CPU = [torch.device("cpu")] * 4
#: For torch these are two devices, and both can be computed on.
TWO = [*CPU[:2], *[torch.device("cpu", 0)] * 2]
