"""One loss over several forwards of the same layers, which reentrant checkpointing recomputes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPVisionModel,
    Trainer,
    TrainingArguments,
)

from tests.frameworks.user import Trained
from tests.frameworks.user.hf import LENGTH, VOCABULARY, Config, settings, trained

REENTRANT = {"use_reentrant": True}
ROWS, CROPS, CLASSES = 128, 3, 4


def train(
    model: nn.Module,
    data: list[dict[str, Tensor]],
    output: Path,
    deepspeed: Config,
    micro_steps: int,
    trainer: type[Trainer] = Trainer,
    **own: Any,
) -> Trained:
    own |= {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": micro_steps,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    args = TrainingArguments(**settings(output, deepspeed, **own))
    return trained(trainer(model=model, args=args, train_dataset=data))


class RewardTrainer(Trainer):
    """Prefers the chosen of two answers, each of which has a forward."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        chosen = model(input_ids=inputs["chosen"]).logits
        rejected = model(input_ids=inputs["rejected"]).logits
        return -functional.logsigmoid(chosen - rejected).mean()


def rewards(
    model: Path, output: Path, deepspeed: Config = None, *, micro_steps: int = 1
) -> Trained:
    """A reward model of a language model."""
    torch.manual_seed(21)
    rated = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    data = [{"chosen": tokens(n), "rejected": tokens(n + ROWS)} for n in range(ROWS)]
    own = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}
    own |= {"learning_rate": 0.5}
    return train(rated, data, output, deepspeed, micro_steps, RewardTrainer, **own)


class Crops(nn.Module):
    """Classifies an image by what a vision tower sees in each of its crops."""

    def __init__(self, tower: CLIPVisionModel) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(tower.config.hidden_size, CLASSES)
        tower.gradient_checkpointing_enable(REENTRANT)

    def forward(self, crops: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen = [self.tower(pixel_values=crop).pooler_output for crop in crops.unbind(1)]
        logits = self.head(torch.stack(seen).mean(0))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def crops(model: Path, output: Path, deepspeed: Config = None, *, micro_steps: int = 1) -> Trained:
    torch.manual_seed(22)
    numbers = torch.Generator().manual_seed(5)
    data = [
        {"crops": torch.randn(CROPS, 3, 8, 8, generator=numbers), "labels": torch.tensor(n % 4)}
        for n in range(ROWS)
    ]
    tower = Crops(CLIPVisionModel.from_pretrained(model))
    return train(tower, data, output, deepspeed, micro_steps, learning_rate=0.5)


class SharedDecoder(nn.Module):
    """Encodes a text, and decodes another one after its states, by the same layers."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        lm.gradient_checkpointing_enable(REENTRANT)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        encoded = self.lm.model(source).last_hidden_state
        embedded = self.lm.model.embed_tokens(target)
        states = self.lm.model(inputs_embeds=torch.cat([encoded, embedded], 1)).last_hidden_state
        logits = self.lm.lm_head(states[:, LENGTH - 1 : -1])
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"loss": loss, "logits": logits}


def shared(model: Path, output: Path, deepspeed: Config = None, *, micro_steps: int = 1) -> Trained:
    data = [{"source": tokens(n), "target": tokens(n + ROWS)} for n in range(ROWS)]
    lm = SharedDecoder(AutoModelForCausalLM.from_pretrained(model))
    return train(lm, data, output, deepspeed, micro_steps, learning_rate=0.2)


def tokens(seed: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed))
