"""Functions of a square weight whose nodes save views of it."""

from typing import Any

import torch
from torch import Tensor


class SavesViews(torch.autograd.Function):
    """A copy, whose gradient is computed from the weight, its transpose and its first row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight, weight.t(), weight[0])
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, transposed, row = ctx.saved_tensors
        return grad * (weight + 2 * transposed - row)


def times_sparse(weight: Tensor) -> Tensor:
    """A node that saves a tensor without a storage."""
    return torch.sparse.mm(torch.eye(len(weight)).to(weight).to_sparse(), weight).square()


def times_bits(weight: Tensor) -> Tensor:
    """A node that saves the weight's memory as integers."""
    integers = {4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.detach().view(integers)
    return weight * bits / bits.abs().max()


VIEWS = {
    "transposed": lambda w: w @ w.t(),
    "transposed on the left": lambda w: w.t() @ w,
    "transposed twice": lambda w: w.t() @ w.t(),
    "transposed, of the values": lambda w: w * w.detach().t(),
    "a row": lambda w: w @ w[0],
    "columns": lambda w: w @ w[:, :2],
    "chunks": lambda w: w.chunk(2)[0] * w.chunk(2)[1],
    "flat": lambda w: w.view(-1) * w.view(-1),
    "a diagonal": lambda w: w * w.diagonal(),
    "a row expanded": lambda w: w * w[:1].expand_as(w),
    "an element expanded": lambda w: w * w[0, 0].expand_as(w),
    "negated": lambda w: w * torch._neg_view(w),
    "conjugated": lambda w: w[:, ::2] * torch.view_as_complex(w.unflatten(1, (-1, 2))).conj().imag,
    "bits": times_bits,
    "sparse": times_sparse,
    "three": SavesViews.apply,
}
