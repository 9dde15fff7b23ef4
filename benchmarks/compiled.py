"""A model of which Dynamo compiles everything, half or nothing, and whether it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPE, SEED
from benchmarks.rows import Row

NOTHING, HALF, ALL = "nothing", "half", "all"

#: How far AdamW's running average of a parameter's gradients may be off: rounding is some per cent
#: after some steps, a factor that the gradients lack 50 or more, what does not train 100.
BAR = 0.25


class Model(nn.Module):
    """Embedding, `layers` x (Linear + ReLU) and a head; its forward returns the loss."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        half = layers // 2
        self.lower = nn.ModuleList(nn.Linear(width, width) for _ in range(half))
        self.upper = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - half))
        self.head = nn.Linear(width, words)
        for layer in (*self.lower, *self.upper):
            # So that nothing fades on the way through the layers, down to gradients that are all
            # rounding.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self._through_upper(_through(self.lower, self.embedding(tokens)))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

    def _through_upper(self, hidden: Tensor) -> Tensor:
        return _through(self.upper, hidden)


def _through(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = torch.relu(layer(hidden))
    return hidden


class _HalfSkipped(Model):
    _through_upper = torch.compiler.disable(Model._through_upper)


class _AllSkipped(Model):
    forward = torch.compiler.disable(Model.forward)


_MODELS: dict[str, Callable[..., Model]] = {NOTHING: Model, HALF: _HalfSkipped, ALL: _AllSkipped}
SKIPPED = tuple(_MODELS)


def model(skipped: str, layers: int, width: int, words: int, device: torch.device) -> Model:
    """The same weights at every call, however much is skipped."""
    torch.manual_seed(SEED)
    with device:
        made = _MODELS[skipped](layers, width, words)
    return made.to(DTYPE)


def graphs() -> int:
    """That Dynamo compiled in this process so far: nothing resets this counter."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def averages(engine: Any) -> dict[str, Tensor]:
    """AdamW's averages of the gradients, by parameter, gathered; nothing on ranks other than 0."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        average = safe_get_full_optimizer_state(param, "exp_avg")
        if dist.get_rank() == 0:
            found[name] = average.cpu()
    return found


def differences(found: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, float]] | None:
    """To what the first row of all kept in this file, or None if it is this one."""
    if not found:
        return None
    if not path.exists():
        torch.save(dict(found), path)
        return None
    kept = torch.load(path, weights_only=True)
    if kept.keys() != found.keys():
        raise RuntimeError(f"not the same parameters: {sorted(kept.keys() ^ found.keys())}")
    return {name: {"gradient": _relative(ours, kept[name])} for name, ours in found.items()}


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Nothing may differ from nothing by nothing alone."""
    difference = torch.linalg.vector_norm(ours - theirs)
    return float(difference / torch.linalg.vector_norm(theirs)) if difference else 0.0


def off_by(row: Row) -> dict[str, float] | None:
    """How far each parameter is off in the round that was compared; None: not compared."""
    compared = next((one for one in row.get("differences") or () if one is not None), None)
    return compared and {name: one["gradient"] for name, one in compared.items()}


def lost(row: Row) -> list[str]:
    """The parameters that are off by more than the bar, or by NaN."""
    return [name for name, off in (off_by(row) or {}).items() if not off <= BAR]
