"""Whether a row trains what eager ZeRO-3 trains: each parameter after the same first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rows import Row
from benchmarks.tables import off_by

#: Of what a row kept, and the most of each. "norm": of the norm of what the parameter moved by,
#: where AdamW divides the size of a gradient away, so it sees a parameter that does not train.
#: "gradient": of AdamW's running average of the gradients, which sees a factor that one lacks, 50
#: per cent or more; rounding is some per cent after some steps.
BARS = {"norm": 0.02, "gradient": 0.25}

#: By parameter, on the CPU: what it moved by, and AdamW's average of its gradients.
Trained = Mapping[str, tuple[Tensor, Tensor]]
#: By parameter: how far off it is, relative to eager's.
Differences = Mapping[str, Mapping[str, float]]


def starts(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, before ZeRO takes them apart."""
    return {name: param.detach().float().cpu() for name, param in model.named_parameters()}


def trained(engine: Any, starts: Mapping[str, Tensor]) -> Trained:
    """Gathered from all ranks, one after another; nothing on ranks other than 0."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        now = safe_get_full_fp32_param(param)
        gradient = safe_get_full_optimizer_state(param, "exp_avg")
        if dist.get_rank() == 0:
            found[name] = now.cpu() - starts[name], gradient.cpu()
    return found


def differences(found: Trained, path: Path) -> Differences | None:
    """To what the first row of all kept in this file, or None if it is this one."""
    if not found:
        return None
    if not path.exists():
        torch.save(found, path)
        return None
    kept = torch.load(path, weights_only=True)
    if kept.keys() != found.keys():
        raise RuntimeError(f"not the same parameters: {sorted(kept.keys() ^ found.keys())}")
    return {name: _difference(*ours, *kept[name]) for name, ours in found.items()}


def _difference(moved: Tensor, average: Tensor, to: Tensor, expected: Tensor) -> dict[str, float]:
    return {
        "norm": _over(abs(_norm(moved) - _norm(to)), _norm(to)),
        "gradient": _over(_norm(average - expected), _norm(expected)),
    }


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _over(difference: float, size: float) -> float:
    """Nothing may differ from nothing by nothing alone."""
    if difference == 0:
        return 0.0
    return difference / size if size else float("inf")


def of_row(row: Row) -> Differences | None:
    """Those of the round that was compared; None: not compared."""
    return next((one for one in row.get("differences") or () if one is not None), None)


def off(row: Row, name: str) -> list[str]:
    """The parameters that are off by more than this one's bar, or by NaN."""
    found = of_row(row) or {}
    return [param for param, one in found.items() if not one[name] <= BARS[name]]


def worst(name: str) -> Callable[[Row], str]:
    """The largest; NaN if any is."""

    def show(row: Row) -> str:
        found = [one[name] for one in (of_row(row) or {}).values()]
        return off_by(max(found, key=lambda value: (value != value, value), default=None))

    return show
