"""A note of a tensor that autograd has saved: a gathered parameter, or a view of one."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SavedView(NamedTuple):
    """Which elements of a storage a tensor has: tensors of equal notes have equal values."""

    storage: int  # as `storage_of` has it
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedView | None:
        """Return None for a tensor whose memory does not tell its values: sparse, or negated."""
        if not (storage := storage_of(tensor)) or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), offset)


def storage_of(tensor: torch.Tensor) -> int:
    """Identify the memory of a tensor for as long as anything refers to it; 0 if it has none."""
    return int(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else 0
