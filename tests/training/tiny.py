"""A model folder that loads and trains in a second: the embedded model's tokenizer on a few random weights."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(folder: Path) -> Path:
    """Write the model into `folder`; needs the embedded model's package."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from midflight.engines.local.models import EMBEDDED, resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(EMBEDDED))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
