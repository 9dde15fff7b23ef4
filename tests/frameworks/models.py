"""Small models of the frameworks, made of a configuration and saved as people download them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_causal(folder: Path) -> None:
    """Two blocks of a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_embedder(folder: Path) -> None:
    """Two blocks of a BERT without dropout, and a mean over the tokens."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(12)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    rest = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = folder / "bert"
    BertModel(BertConfig(**sizes, **heads, **rest)).save_pretrained(bert)
    tokenizer().save_pretrained(bert)
    words = Transformer(str(bert))
    parts = [words, Pooling(16, pooling_mode="mean")]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))


def tokenizer() -> Any:
    """One token for a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", *(f"w{n}" for n in range(61))]
    fast = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
