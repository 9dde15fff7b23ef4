"""A step or two of DPO and of GRPO by TRL, with LoRA adapters by PEFT."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tests.frameworks.user import Trained

ADAPTERS = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
COMMON: dict[str, Any] = {
    "accelerator_config": {"use_configured_state": True},
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": True,
    "optim": "sgd",
    "learning_rate": 50.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
    "bf16": False,
}


def dpo(model: Path, **arguments: Any) -> Any:
    data = [
        {"prompt": f"w{n} w{n + 1}", "chosen": f" w{n} w{n}", "rejected": f" w{n + 2} w{n + 3}"}
        for n in range(32)
    ]
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=DPOConfig(**arguments),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=ADAPTERS,
    )


def grpo(model: Path, **arguments: Any) -> Any:
    """The reward is for even tokens."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / 8 for tokens in completion_ids]

    generation = {
        "num_generations": 2,
        "max_completion_length": 8,
        "gradient_accumulation_steps": 2,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=GRPOConfig(**arguments, **generation),
        train_dataset=Dataset.from_list([{"prompt": f"w{n} w{n + 1}"} for n in range(32)]),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=ADAPTERS,
    )


def train(
    kind: str, model: Path, output: Path, deepspeed: dict[str, Any] | None = None, **more: Any
) -> Trained:
    torch.manual_seed(13)
    arguments = COMMON | more | {"output_dir": str(output), "deepspeed": deepspeed}
    trainer = {"dpo": dpo, "grpo": grpo}[kind](model, **arguments)
    trainer.train()
    lines = trainer.state.log_history
    return Trained(trainer.model_wrapped, [line["loss"] for line in lines if "loss" in line])
