"""PEFT's LoRA on a Llama, recomputed as the Trainer has it, against plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.training import stock
from tests.training.models import batch
from tests.training.options import HALVES, Options, config
from tests.training.run import applied, check
from tests.training.surroundings import RATE, build_engine
from tests.training.trainers import parameters, worst_difference
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
        self.peft = adapted(LlamaForCausalLM(LLAMA), **whole)
        if inputs:
            self.peft.enable_input_require_grads()
        self.peft.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.peft(input_ids=tokens, use_cache=False).logits
        return logits


def adapted(base: Any, **more: Any) -> Any:
    return get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **more))


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


def test_adapters_of_another_dtype_than_the_base(world: World) -> None:
    """Stock 0.19.2 gathers all persistent parameters as if they had the first one's."""
    for error, _, _ in world.run(under_init, ()):
        assert bool(error) == (stock.Version("0.19.2") == stock.RELEASE), error
    for error, difference, moved in world.run(under_init, PATCHES):
        assert not error
        assert difference < 0.05 * moved


def under_init(patches: tuple[str, ...]) -> tuple[str, float, float]:
    """LoRA with adapters of fp32, on a base of bf16 that was built under ``zero.Init``.

    What is raised; how far it is from plain PyTorch, and that from the start.
    """
    import deepspeed

    settings = config(3, zero={"stage3_param_persistence_threshold": 100}, **HALVES["bfloat16"])
    torch.manual_seed(3)
    with applied(*patches):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            base = LlamaForCausalLM(LLAMA)
        engine = build_engine(adapted(base), settings)
        plain = adapted(LlamaForCausalLM(LLAMA).bfloat16())
        try:
            start = parameters(engine.module)
            plain.load_state_dict(start)
            train_both(engine, plain)
            found = parameters(engine.module)
        except Exception as error:
            return str(error), 0.0, 0.0
    expected = parameters(plain)
    return "", worst_difference(found, expected)[0], worst_difference(start, expected)[0]


def train_both(engine: Any, plain: Any) -> None:
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for step in range(3):
        tokens, classes = batch(step)
        for model in (engine, plain):
            loss = loss_of(model(input_ids=tokens.view(2, 3), use_cache=False).logits, classes)
            engine.backward(loss) if model is engine else loss.backward()
        for param in trained:
            dist.all_reduce(param.grad, dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
