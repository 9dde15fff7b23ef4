"""The model that is trained, its data, and a ZeRO-3 engine around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.dc_fallback.rows import ALL, EAGER, HALF, NOTHING
from benchmarks.engines import DTYPE, SEED, config

_LEARNING_RATE = 1e-4


class Model(nn.Module):
    """Embedding, `layers` x (Linear + ReLU) and a head; its forward returns the loss."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lower = nn.ModuleList(nn.Linear(width, width) for _ in range(layers // 2))
        self.upper = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - layers // 2))
        self.head = nn.Linear(width, words)
        for layer in (*self.lower, *self.upper):
            # So that nothing fades on the way through the layers, down to gradients that are all
            # rounding.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self._through_upper(self._through_lower(self.embedding(tokens)))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

    def _through_lower(self, hidden: Tensor) -> Tensor:
        for layer in self.lower:
            hidden = torch.relu(layer(hidden))
        return hidden

    def _through_upper(self, hidden: Tensor) -> Tensor:
        for layer in self.upper:
            hidden = torch.relu(layer(hidden))
        return hidden


class _HalfSkipped(Model):
    _through_upper = torch.compiler.disable(Model._through_upper)


class _AllSkipped(Model):
    forward = torch.compiler.disable(Model.forward)


_MODELS: dict[str, Callable[..., Model]] = {NOTHING: Model, HALF: _HalfSkipped, ALL: _AllSkipped}


@dataclass(frozen=True)
class Workload:
    """The sizes; `batch` x `tokens` a rank."""

    layers: int
    width: int
    words: int
    batch: int
    tokens: int
    reduce_bucket_size: int | None  # elements; the largest parameter's, if None

    def model(self, skipped: str, device: torch.device) -> Model:
        """The same weights at every call, however much is skipped."""
        torch.manual_seed(SEED)
        with device:
            model = _MODELS[skipped](self.layers, self.width, self.words)
        return model.to(DTYPE)

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets; every rank has its own."""
        generator = torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())
        shape = (2, self.batch, self.tokens)
        tokens, targets = torch.randint(self.words, shape, generator=generator, device=device)
        return tokens, targets

    def engine(self, model: Model, mode: str) -> Any:
        """A ``DeepSpeedEngine``, compiled unless eager. Its process ends with it."""
        import deepspeed

        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        compiled = mode != EAGER
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._config(compiled)
        )
        if compiled:
            engine.compile()
        return engine

    def _config(self, compiled: bool) -> dict[str, Any]:
        bucket = self.reduce_bucket_size or self.width * max(self.width, self.words)
        settings = config(
            self.batch,
            stage=3,
            # DeepSpeed's default of 1 GB is more than all the rest of this model takes.
            reduce_bucket_size=bucket,
            stage3_param_persistence_threshold=0,
        )
        return settings | ({"compile": {"deepcompile": True}} if compiled else {})
