"""PEFT's LoRA on a small Llama, its layers under checkpoint() as the Trainer sets it."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.frameworks.saved import SIZES
from tests.training.models import batch


class Lora(nn.Module):
    """reentrant: of checkpoint(). inputs: made to need a gradient. saved: trained whole."""

    reentrant = False
    inputs = True
    saved: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        llama = LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **SIZES))
        lora = LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj", "down_proj"],
            modules_to_save=[*self.saved] or None,
            init_lora_weights=False,
        )
        self.peft = get_peft_model(llama, lora)
        if self.inputs:
            self.peft.enable_input_require_grads()
        self.peft.gradient_checkpointing_enable({"use_reentrant": self.reentrant})

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.peft(input_ids=tokens, use_cache=False).logits
        return logits


class WithoutInputs(Lora):
    inputs = False


class Reentrant(Lora):
    reentrant = True


class Saving(Lora):
    saved = ("lm_head",)


class SavingWithoutInputs(Saving):
    inputs = False


class SavingReentrant(Saving):
    reentrant = True


def train(trainer: Any) -> None:
    for step in trainer.steps():
        trainer.module.train()
        trainer.backward(loss_of(trainer, step))
        trainer.step()


def train_and_generate(trainer: Any) -> None:
    """With evaluations of both kinds in between."""
    for step in trainer.steps():
        trainer.module.eval()
        tokens, _ = batch(step, 5)
        with torch.inference_mode():
            trainer.module.peft.generate(input_ids=tokens.view(2, 3), max_new_tokens=3, **GREEDY)
        trainer.module.train()
        trainer.backward(loss_of(trainer, step))
        trainer.step()


GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 3}


def loss_of(trainer: Any, step: int) -> Tensor:
    tokens, classes = batch(step)
    logits = trainer(tokens.view(2, 3))
    return functional.cross_entropy(logits.flatten(0, 1).float(), classes)
