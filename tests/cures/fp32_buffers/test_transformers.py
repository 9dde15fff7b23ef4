"""Llama and a mixture of experts of transformers: what they compute positions and routes by."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.harness import Options, World, applied, build_engine

pytest.importorskip("transformers", reason="transformers is not installed: `frameworks` has it")

import transformers

from tests.cures.fp32_buffers.test_buffers import ENGINE_CASTS, FP32, buffers, same

LAST = 8192
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LAST,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = SMALL | {
    "moe_intermediate_size": 32, "n_routed_experts": 64, "num_experts_per_tok": 4, "head_dim": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def make(name: str) -> Any:
    settings = EXPERTS if name == "Glm4Moe" else SMALL
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def biased(model: Any) -> Any:
    """A router whose values are near each other: bf16 has one for all of them."""
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.copy_(torch.linspace(5, 5.1, buffer.numel()))
    return model


def unlike(name: str, how: str, folder: Path, *patches: str) -> list[str]:
    """Buffers of an engine, after a forward, that differ from plain PyTorch's."""
    wanted, options = buffers(biased(make(name))), Options(3, dtype="bfloat16")
    with applied(*patches):
        if how == "from_pretrained":
            from transformers.integrations import HfDeepSpeedConfig

            settings = HfDeepSpeedConfig(options.config)
            model = getattr(transformers, f"{name}ForCausalLM").from_pretrained(folder)
            del settings
        else:
            with deepspeed.zero.Init(config_dict_or_path=options.config):
                model = biased(make(name))
        engine = build_engine(model.eval(), options.config)
        with torch.no_grad():
            engine(input_ids=torch.arange(6)[None], position_ids=torch.arange(0, LAST, 1366)[None])
        return same(buffers(model), wanted)


@pytest.mark.core_case
@pytest.mark.parametrize("name", ["Llama", "Glm4Moe"])
@pytest.mark.parametrize("how", ["init", "from_pretrained"])
def test_buffers(world: World, tmp_path: Path, name: str, how: str) -> None:
    """`zero.Init` is wrong in every release."""
    biased(make(name)).save_pretrained(tmp_path)
    if how == "init" or ENGINE_CASTS:
        assert all(world.run(unlike, name, how, tmp_path))
    assert not any(world.run(unlike, name, how, tmp_path, *FP32))
