"""Model folders that load and train in a second: a few random weights under a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_tiny_model(folder: Path, hidden: int = 32) -> Path:
    """Write one with the embedded model's tokenizer into `folder`; needs its package. It has two heads."""
    from transformers import AutoTokenizer

    from midflight.engines.local.models import EMBEDDED, resolve

    return _write(folder, AutoTokenizer.from_pretrained(resolve(EMBEDDED)), vocab_size=49152, end=2, hidden=hidden)


CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_byte_model(folder: Path, *, hidden: int = 32, dtype: str = "float32", chat: bool = False) -> Path:
    """Write one whose tokens are the 256 bytes and an end; it needs no package and loads at once.

    Its weights are numbers of `dtype`; its tokenizer has a chat template where `chat` says so.
    """
    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT
    return _write(folder, tokenizer, vocab_size=257, end=0, hidden=hidden, dtype=dtype)


def byte_tokenizer() -> Any:
    """One whose tokens are an end and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _write(
    folder: Path, tokenizer: Any, *, vocab_size: int, end: int, hidden: int = 32, dtype: str = "float32"
) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=end,
        pad_token_id=end,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
