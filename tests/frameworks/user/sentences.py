"""Sentence embeddings by sentence-transformers' own Trainer and its cached contrastive loss."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

from tests.frameworks.user import Trained

BATCH, CHUNK, STEPS = 8, 2, 4


def train(
    model: Path, output: Path, deepspeed: dict[str, Any] | None = None, *, micro_steps: int = 1
) -> Trained:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        deepspeed=deepspeed,
        accelerator_config={"use_configured_state": True},
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=micro_steps,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    embedder = SentenceTransformer(str(model))
    trainer = SentenceTransformerTrainer(
        model=embedder,
        args=arguments,
        train_dataset=pairs(),
        loss=CachedMultipleNegativesRankingLoss(embedder, mini_batch_size=CHUNK),
    )
    trainer.train()
    return Trained(
        trainer.model_wrapped,
        [line["loss"] for line in trainer.state.log_history if "loss" in line],
    )


def pairs() -> Dataset:
    """Questions and answers that share words."""
    numbers = range(BATCH * STEPS * 4)
    return Dataset.from_dict(
        {
            "anchor": [f"w{n % 29} w{n % 7} w{n % 13}" for n in numbers],
            "positive": [f"w{n % 13} w{n % 29} w{n % 5}" for n in numbers],
        }
    )
