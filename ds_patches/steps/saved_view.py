"""Identity of a tensor that autograd has saved: a gathered parameter, or a view of one."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SavedView(NamedTuple):
    """The elements of a storage that a tensor shows. Tensors with equal views have equal values."""

    storage: int  # `storage_of` the tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedView | None:
        """Return a tensor's view; None if it is sparse, negated or conjugated."""
        if not (storage := storage_of(tensor)) or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), offset)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's memory, unique while anything refers to it; 0 if it has none."""
    return int(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else 0
