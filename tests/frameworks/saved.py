"""Small models of the frameworks, made of a configuration and saved as people download them."""

from pathlib import Path
from typing import Any

import torch

from tests.harness.trainers import Parameters

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def save_causal(folder: Path) -> Parameters:
    """Two blocks of a Llama; what they are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **SIZES))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return {name: param.detach() for name, param in model.named_parameters()}


def save_embedder(folder: Path) -> Parameters:
    """Two blocks of a BERT without dropout, and a mean over the tokens; what they are."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(12)
    bert = folder / "bert"
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(**SIZES, **no_dropout)).save_pretrained(bert)
    tokenizer().save_pretrained(bert)
    modules = [Transformer(str(bert)), Pooling(SIZES["hidden_size"], pooling_mode="mean")]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(folder))
    return {name: param.detach() for name, param in model.named_parameters()}


def tokenizer() -> Any:
    """One token for a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", *(f"w{n}" for n in range(SIZES["vocab_size"] - 3))]
    fast = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
