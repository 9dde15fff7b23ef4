"""A small Switch Transformer, whose layers call the experts that a batch is routed to."""

from torch import Tensor, nn
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

SIZES = {"vocab_size": 12, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2}
SIZES |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
SIZES |= {"num_experts": 8, "expert_capacity": 8}


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = SwitchTransformersConfig(**SIZES, dropout_rate=0.0, router_jitter_noise=0.0)
        self.t5 = SwitchTransformersForConditionalGeneration(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.t5(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits
        return logits
