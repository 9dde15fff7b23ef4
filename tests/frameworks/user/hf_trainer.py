"""A causal language model by the Trainer of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.frameworks.user import Trained

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 2, 4


def train(
    model: Path,
    output: Path,
    deepspeed: dict[str, Any] | None = None,
    *,
    micro_steps: int = 4,
    resume: Path | None = None,
    **more: Any,
) -> Trained:
    arguments = TrainingArguments(
        output_dir=str(output),
        deepspeed=deepspeed,
        accelerator_config={"use_configured_state": True},
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=micro_steps,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        **{"save_strategy": "no", **more},
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=arguments,
        train_dataset=samples(),
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return Trained(
        trainer.model_wrapped,
        [line["loss"] for line in trainer.state.log_history if "loss" in line],
    )


def samples() -> list[dict[str, torch.Tensor]]:
    """Of other lengths, so that it matters by what a loss is divided."""
    made = torch.Generator().manual_seed(3)
    found = []
    for index in range(128):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=made)
        labels = tokens.clone()
        labels[: index % (LENGTH // 2)] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found
