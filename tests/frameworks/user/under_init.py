"""PEFT's LoRA with adapters of fp32, on a base of bf16 that was built under ``zero.Init``."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.frameworks.saved import SIZES
from tests.training.models import batch
from tests.training.options import HALVES, config
from tests.training.run import applied
from tests.training.surroundings import RATE, build_engine
from tests.training.trainers import parameters, worst_difference

LLAMA = LlamaConfig(num_key_value_heads=1, **SIZES)


def lora(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(r=2, init_lora_weights=False))


def train(patches: tuple[str, ...]) -> tuple[str, float, float]:
    """What is raised; how far it is from plain PyTorch, and that from the start."""
    settings = config(3, zero={"stage3_param_persistence_threshold": 100}, **HALVES["bfloat16"])
    torch.manual_seed(3)
    with applied(*patches):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            base = LlamaForCausalLM(LLAMA)
        engine = build_engine(lora(base), settings)
        plain = lora(LlamaForCausalLM(LLAMA).bfloat16())
        try:
            start = parameters(engine.module)
            plain.load_state_dict(start)
            _train(engine, plain)
            found = parameters(engine.module)
        except Exception as error:
            return str(error), 0.0, 0.0
    expected = parameters(plain)
    return "", worst_difference(found, expected)[0], worst_difference(start, expected)[0]


def _train(engine: Any, plain: Any) -> None:
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=RATE)
    for step in range(3):
        tokens, classes = batch(step)
        for model in (engine, plain):
            logits = model(input_ids=tokens.view(2, 3), use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), classes)
            engine.backward(loss) if model is engine else loss.backward()
        for param in optimizer.param_groups[0]["params"]:
            dist.all_reduce(param.grad, dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
