"""An adapter on a mixture of experts, whose weights PEFT wraps one by one: merged they are what the trainer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from midflight.engines.local import LocalEngine, load
from midflight.recipe.config import TrainingConfig
from midflight.training.packing import Row
from midflight.training.policy import Policy
from midflight.training.step import Updater
from tests.training.tiny import byte_tokenizer

pytestmark = pytest.mark.model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_sampler_gets_the_adapter_on_every_expert(folder: str, tmp_path: Path) -> None:
    policy = Policy(load(folder), lora=(4, 8.0), reference=False, seed=0)
    wrapped = {name for name, _ in policy.causal.named_parameters() if "experts" in name and "lora_B" in name}
    assert len(wrapped) == 4  # two weights of experts in each of two layers
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.causal.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
    sampler = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        before = sampler(input_ids=ids).logits
        policy.write(sampler)
        after, trainers = (model(input_ids=ids).logits for model in (sampler, policy.causal))
    assert float((after - trainers).abs().max()) < 1e-5 < 0.1 < float((after - before).abs().max())


def test_an_update_reaches_it(folder: str) -> None:
    loaded = load(folder)
    policy = Policy(loaded, lora=(4, 8.0), reference=False, seed=0)
    sampler = load(folder).model
    engine = LocalEngine(load(folder), chat_template=False)
    policy.write(sampler)
    drawn = Row(tuple(range(5, 25)), (30, 31, 32), (0.0,) * 3, (False,) * 3, 1.0, None, advantage=1.0, weight=1 / 3)
    settings = TrainingConfig(kl_beta=0.0, max_drift=100.0)
    metrics = Updater(policy, torch.optim.SGD(policy.parameters(), lr=0.1), sampler, engine.masks, settings).update(
        [drawn]
    )
    engine.close()
    assert metrics.grad_norm > 0
    moved = [name for name, parameter in policy.causal.named_parameters() if "lora_B" in name and parameter.any()]
    assert any("experts.lora_B" in name for name in moved) and any("base_layer.lora_B" in name for name in moved)
