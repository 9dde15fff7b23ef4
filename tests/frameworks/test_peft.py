"""PEFT's LoRA on a Llama, recomputed as the Trainer has it, against plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.models import batch
from tests.training.options import Options
from tests.training.run import check
from tests.world import World

pytest.importorskip("peft", reason="peft is not installed: it is in the extra `frameworks`")

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.frameworks.saved import SIZES

pytestmark = pytest.mark.exhaustive
PATCHES = ("zero3_retain", "zero3_hooks")
LLAMA = LlamaConfig(num_key_value_heads=1, **SIZES)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 3}


class Lora(nn.Module):
    """reentrant: of checkpoint(). inputs: made to need a gradient. saved: trained whole."""

    def __init__(self, reentrant: bool, inputs: bool, saved: tuple[str, ...]) -> None:
        super().__init__()
        targets = ["q_proj", "v_proj", "down_proj"]
        whole = {"target_modules": targets, "modules_to_save": [*saved] or None}
        lora = LoraConfig(r=2, init_lora_weights=False, **whole)
        self.peft = get_peft_model(LlamaForCausalLM(LLAMA), lora)
        if inputs:
            self.peft.enable_input_require_grads()
        self.peft.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.peft(input_ids=tokens, use_cache=False).logits
        return logits


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), classes)


def train_and_generate(trainer: Any) -> None:
    """With evaluations of both kinds in between."""
    for step in trainer.steps():
        trainer.module.eval()
        tokens, _ = batch(step, 5)
        with torch.inference_mode():
            trainer.module.peft.generate(input_ids=tokens.view(2, 3), max_new_tokens=3, **GREEDY)
        trainer.module.train()
        tokens, classes = batch(step)
        trainer.backward(loss_of(trainer(tokens.view(2, 3)), classes))
        trainer.step()


@pytest.mark.parametrize("saved", [(), ("lm_head",)])
@pytest.mark.parametrize(("reentrant", "inputs"), [(False, True), (False, False), (True, True)])
def test_lora(world: World, reentrant: bool, inputs: bool, saved: tuple[str, ...]) -> None:
    model: Any = partial(Lora, reentrant, inputs, saved)
    check(world, train_and_generate, Options(model=model), *PATCHES)
