"""The models: for each its class, what its configuration has, and what a batch of it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

VOCABULARY, LENGTH, IMAGE = 64, 8, 60
#: Names that configurations have for each size; one leaves alone the names that are not its own.
SIZES = {
    64: "vocab_size",
    32: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff max_position_embeddings",
    16: "hidden_size d_model moe_intermediate_size shared_expert_intermediate_size image_size "
    "max_target_positions word_embed_proj_dim projection_dim",
    8: "head_dim d_kv q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "num_mel_bins max_source_positions embedding_size",
    4: "patch_size num_experts num_local_experts n_routed_experts state_size "
    "num_conv_pos_embeddings",
    2: "num_hidden_layers num_layers encoder_layers decoder_layers num_attention_heads num_heads "
    "encoder_attention_heads decoder_attention_heads num_experts_per_tok eos_token_id "
    "decoder_start_token_id num_conv_pos_embedding_groups num_stages num_key_value_heads",
    1: "bos_token_id n_group topk_group first_k_dense_replace",
    0: "pad_token_id",
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= {"initializer_range": 0.2, "init_std": 0.2, "ctc_loss_reduction": "mean"}
SMALL |= {"use_cache": False, "output_router_logits": True, "mask_time_prob": 0.0}
SMALL |= {"image_token_index": IMAGE, "vision_feature_layer": -1}

Batch = dict[str, Any]
#: Of a class and its configuration's settings beside the small ones.
Model = tuple[str, dict[str, Any], Callable[[Generator], Batch]]


def text(numbers: Generator) -> Batch:
    tokens = torch.randint(3, IMAGE, (2, LENGTH), generator=numbers)
    return {"input_ids": tokens, "labels": tokens}


def image(numbers: Generator) -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=numbers)
    return {"pixel_values": pixels, "labels": torch.randint(2, (2,), generator=numbers)}


def pairs(numbers: Generator) -> Batch:
    whole = {**text(numbers), **image(numbers), "return_loss": True}
    return {name: part for name, part in whole.items() if name != "labels"}


def pictured(numbers: Generator) -> Batch:
    """Text behind an image of sixteen patches."""
    tokens = torch.cat([torch.full((2, 16), IMAGE), text(numbers)["input_ids"]], 1)
    return {**image(numbers), "input_ids": tokens, "labels": tokens}


def waves(numbers: Generator) -> Batch:
    sound = torch.randn(2, 400, generator=numbers)
    return {"input_values": sound, "labels": text(numbers)["labels"]}


def spectra(numbers: Generator) -> Batch:
    sound = torch.randn(2, 8, 16, generator=numbers)
    return {"input_features": sound, "labels": text(numbers)["labels"]}


TIED = {"tie_word_embeddings": True}
HEARD = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
CONVOLVED = {"hidden_sizes": [8, 16], "depths": [1, 1]}
PARTS = {"text_config": SMALL, "vision_config": SMALL}
LLAVA = {
    "text_config": SMALL | {"model_type": "llama"},
    "vision_config": SMALL | {"model_type": "clip_vision_model"},
}
MODELS: dict[str, Model] = {
    "Llama": ("LlamaForCausalLM", {}, text),
    "Llama, tied": ("LlamaForCausalLM", TIED, text),
    "Mistral": ("MistralForCausalLM", {"num_key_value_heads": 1}, text),
    "Qwen2, tied": ("Qwen2ForCausalLM", TIED, text),
    "Qwen3": ("Qwen3ForCausalLM", {}, text),
    "Gemma 2, tied": ("Gemma2ForCausalLM", TIED, text),
    "Phi": ("PhiForCausalLM", {}, text),
    "GPT-2, tied": ("GPT2LMHeadModel", TIED, text),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}, text),
    "OPT, tied": ("OPTForCausalLM", {**TIED, "word_embed_proj_dim": 8}, text),
    "Mixtral": ("MixtralForCausalLM", {}, text),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", {}, text),
    "GPT-OSS": ("GptOssForCausalLM", {}, text),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {}, text),
    "Mamba": ("MambaForCausalLM", {}, text),
    "BERT": ("BertForMaskedLM", {}, text),
    "ModernBERT": ("ModernBertForMaskedLM", {}, text),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", {}, text),
    "ALBERT, shared layers": ("AlbertForMaskedLM", {}, text),
    "T5": ("T5ForConditionalGeneration", {}, text),
    "BART": ("BartForConditionalGeneration", {}, text),
    "ViT": ("ViTForImageClassification", {}, image),
    "ConvNeXt": ("ConvNextForImageClassification", CONVOLVED, image),
    "ResNet": ("ResNetForImageClassification", CONVOLVED, image),
    "Wav2Vec2": ("Wav2Vec2ForCTC", HEARD, waves),
    "Whisper": ("WhisperForConditionalGeneration", {}, spectra),
    "CLIP": ("CLIPModel", PARTS, pairs),
    "SigLIP": ("SiglipModel", PARTS, pairs),
    "LLaVA": ("LlavaForConditionalGeneration", LLAVA, pictured),
}


class TwoForwards(nn.Module):
    """Runs a model twice within one forward, and returns the sum of both losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: Batch, second: Batch) -> Tensor:
        loss: Tensor = self.model(**first).loss + self.model(**second).loss
        return loss


def build(name: str, use_reentrant: bool | None = None, wrapped: bool = False) -> nn.Module:
    """Build a model.

    use_reentrant: the form of gradient checkpointing; None for no checkpointing. ALBERT, ConvNeXt
        and ResNet have no layers that are checkpointed.
    wrapped: return the model in a `TwoForwards`.
    """
    import transformers

    kind, settings, _ = MODELS[name]
    of = getattr(transformers, kind)
    config = of.config_class(**SMALL | settings)
    for sub_config in (config, *(getattr(config, part) for part in config.sub_configs)):
        for setting, value in vars(sub_config).items():
            if "drop" in setting and isinstance(value, float):
                setattr(sub_config, setting, 0.0)
    model = of(config)
    if use_reentrant is not None and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return TwoForwards(model).train() if wrapped else model.train()


def batch(name: str, seed: int) -> Batch:
    return MODELS[name][2](Generator().manual_seed(seed))
