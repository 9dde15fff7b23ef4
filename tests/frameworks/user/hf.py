"""By Trainers: transformers' own, that of sentence-transformers, and TRL's with LoRA adapters."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from tests.frameworks.user import Trained

VOCABULARY, LENGTH = 64, 12
Config = dict[str, Any] | None


def settings(output: Path, deepspeed: Config, **own: Any) -> dict[str, Any]:
    """Return the arguments that all Trainers get."""
    return {
        "output_dir": str(output),
        "deepspeed": deepspeed,
        "accelerator_config": {"use_configured_state": True},
        "max_steps": 4,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **own,
    }


def trained(trainer: Any) -> Trained:
    trainer.train()
    lines = trainer.state.log_history
    return Trained(trainer.model_wrapped, [line["loss"] for line in lines if "loss" in line])


def language_model(
    model: Path, output: Path, deepspeed: Config = None, *, micro_steps: int = 4
) -> Trained:
    """A causal language model by the Trainer of transformers."""
    own = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.2,
    }
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(**settings(output, deepspeed, **own)),
        train_dataset=samples(),
    )
    return trained(trainer)


def samples() -> list[dict[str, torch.Tensor]]:
    """Return samples of other lengths, so that it matters by what a loss is divided."""
    made = torch.Generator().manual_seed(3)
    rows = []
    for index in range(128):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=made)
        labels = tokens.clone()
        labels[: index % (LENGTH // 2)] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def sentences(
    model: Path,
    output: Path,
    deepspeed: Config = None,
    *,
    micro_steps: int = 1,
    loss: str = "CachedMultipleNegativesRankingLoss",
) -> Trained:
    """Sentence embeddings with a contrastive loss, of questions that share words.

    Losses without a cache recompute the layers by reentrant checkpointing.
    """
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers import losses

    own: dict[str, Any] = {"per_device_train_batch_size": 8, "learning_rate": 0.5}
    is_cached = loss.startswith("Cached")
    if not is_cached:
        own |= {"gradient_checkpointing": True}
        own |= {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    arguments = settings(output, deepspeed, gradient_accumulation_steps=micro_steps, **own)
    embedder = library.SentenceTransformer(str(model))
    columns = {
        "anchor": [f"w{n % 29} w{n % 7} w{n % 13}" for n in range(128)],
        "positive": [f"w{n % 13} w{n % 29} w{n % 5}" for n in range(128)],
    }
    if loss == "TripletLoss":
        columns["negative"] = [f"w{n % 11} w{n % 3} w{n % 17}" for n in range(128)]
    trainer = library.SentenceTransformerTrainer(
        model=embedder,
        args=library.SentenceTransformerTrainingArguments(**arguments),
        train_dataset=Dataset.from_dict(columns),
        loss=getattr(losses, loss)(embedder, **{"mini_batch_size": 2} if is_cached else {}),
    )
    return trained(trainer)


def dpo(model: Path, output: Path, deepspeed: Config = None, **more: Any) -> Trained:
    """Two steps of DPO with LoRA adapters."""
    import trl

    data = [
        {"prompt": f"w{n} w{n + 1}", "chosen": f" w{n} w{n}", "rejected": f" w{n + 2} w{n + 3}"}
        for n in range(32)
    ]
    arguments = _settings_of_trl(output, deepspeed, **more)
    return trained(trl.DPOTrainer(args=trl.DPOConfig(**arguments), **_adapted(model, data)))


def grpo(model: Path, output: Path, deepspeed: Config = None) -> Trained:
    """Two steps of GRPO with LoRA adapters; the reward is for even tokens."""
    import trl

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / 8 for tokens in completion_ids]

    own = {"num_generations": 2, "max_completion_length": 8, "gradient_accumulation_steps": 2}
    arguments = trl.GRPOConfig(**_settings_of_trl(output, deepspeed, **own))
    data = [{"prompt": f"w{n} w{n + 1}"} for n in range(32)]
    return trained(trl.GRPOTrainer(reward_funcs=reward, args=arguments, **_adapted(model, data)))


def _settings_of_trl(output: Path, deepspeed: Config, **own: Any) -> dict[str, Any]:
    torch.manual_seed(13)
    usual = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
        "learning_rate": 50.0,
        "bf16": False,
    }
    return settings(output, deepspeed, **usual | own)


def _adapted(model: Path, data: list[dict[str, str]]) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig

    targets = ["q_proj", "v_proj"]
    return {
        "model": AutoModelForCausalLM.from_pretrained(model),
        "train_dataset": Dataset.from_list(data),
        "processing_class": AutoTokenizer.from_pretrained(model),
        "peft_config": LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets),
    }
