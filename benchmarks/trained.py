"""Whether a row trains what another one trains: each parameter after the same first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rows import Row
from benchmarks.tables import off_by

# Rounding in bf16 is less; not to train is all of it.
_NORM_TOLERANCE = 0.02
# Rounding is some per cent after some steps; a factor that a gradient lacks is 50 per cent or more.
_GRADIENT_TOLERANCE = 0.25
_NAMES = 3  # that a table shows


@dataclass
class Difference:
    """Of one parameter's training to the other's, each relative to the other's.

    norm: of the norm of what the parameter moved by. AdamW divides the size of a gradient away, so
        it sees a parameter that does not train, and no factor in a gradient.
    update: of the vector of it. AdamW's first steps go by the sign of each element, so rounding
        alone is worth some per cent here.
    gradient: of AdamW's running average of the gradients, which sees any factor.
    """

    norm: float
    update: float
    gradient: float

    @property
    def is_training(self) -> bool:
        return self.norm <= _NORM_TOLERANCE

    @property
    def has_gradients(self) -> bool:
        return self.gradient <= _GRADIENT_TOLERANCE

    @classmethod
    def worst(cls, differences: Iterable[Difference]) -> Difference:
        """Each of the largest; NaN if any is."""
        columns = zip(*map(astuple, differences), strict=True)
        return cls(*(max(one, key=lambda value: (value != value, value)) for one in columns))


class Trained(NamedTuple):
    """Of one parameter, on the CPU: what it moved by, and AdamW's average of its gradients."""

    update: Tensor
    gradient: Tensor


def starts(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, before ZeRO takes them apart."""
    return {name: param.detach().float().cpu() for name, param in model.named_parameters()}


def trained(engine: Any, starts: dict[str, Tensor]) -> dict[str, Trained]:
    """Gathered from all ranks, one after another; nothing on ranks other than 0."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        now = safe_get_full_fp32_param(param)
        gradient = safe_get_full_optimizer_state(param, "exp_avg")
        if dist.get_rank() == 0:
            found[name] = Trained(now.cpu() - starts[name], gradient.cpu())
    return found


def keep(found: dict[str, Trained], path: Path) -> None:
    """For the processes that come later."""
    if found:
        torch.save({name: tuple(one) for name, one in found.items()}, path)


def differences(
    found: dict[str, Trained], path: Path, device: torch.device
) -> dict[str, Difference]:
    """To what was kept; where nothing was found, nothing."""
    if not found:
        return {}
    kept = torch.load(path, mmap=True, weights_only=True)
    if kept.keys() != found.keys():
        raise RuntimeError(f"not the same parameters: {sorted(kept.keys() ^ found.keys())}")
    return {
        name: _difference(*([tensor.to(device) for tensor in one] for one in (ours, kept[name])))
        for name, ours in found.items()
    }


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> Difference:
    update, gradient = (_relative(*pair) for pair in zip(ours, theirs, strict=True))
    moved, expected = (torch.linalg.vector_norm(one[0]).item() for one in (ours, theirs))
    return Difference(_over(abs(moved - expected), expected), update, gradient)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    difference, size = (torch.linalg.vector_norm(one).item() for one in (ours - theirs, theirs))
    return _over(difference, size)


def _over(difference: float, size: float) -> float:
    """Nothing may differ from nothing by nothing alone."""
    if difference == 0:
        return 0.0
    return difference / size if size else float("inf")


# Of a row that kept the differences of each round, or None.


def of_row(row: Row) -> dict[str, Difference] | None:
    """By parameter, of the round that was compared; None: not compared."""
    found = next((one for one in row.get("differences") or () if one is not None), None)
    return None if found is None else {name: Difference(**one) for name, one in found.items()}


def untrained(row: Row) -> list[str]:
    """The parameters that did not move as far as eager's."""
    return [name for name, one in (of_row(row) or {}).items() if not one.is_training]


def lost(row: Row) -> str:
    if not of_row(row):
        return "-"
    names = [f"`{name}`" for name in untrained(row)]
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more or "none"


def worst(place: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        found = of_row(row)
        return off_by(astuple(Difference.worst(found.values()))[place] if found else None)

    return show
