"""Models that do not take Midflight's attention: said why, and sampled and trained by their own forward."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.api import recipe_for
from midflight.engines.base import GenerateRequest, Message, Sampling
from midflight.engines.local import LocalEngine, ModelError, load, support
from midflight.engines.local.support import is_ours
from midflight.errors import UserError
from midflight.recipe.config import TrainingConfig
from midflight.tasks.base import Task
from midflight.tools import tool
from midflight.training import update
from midflight.training.packing import Row, pack_rows, rows_apart
from midflight.training.policy import Policy
from midflight.training.step import Updater
from midflight.training.trainer import train
from tests.training.tiny import byte_tokenizer

pytestmark = pytest.mark.model

GRAMMAR = 'start: "x" /[a-c]{4}/ "y"\n'
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": None,
}
HEADS: dict[str, Any] = {
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def windowed() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=8))


def mixed() -> Any:
    """Every second of Ministral's layers sees a window only."""
    from transformers import MinistralConfig, MinistralForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    return MinistralForCausalLM(MinistralConfig(**SIZES, **{"sliding_window": 8, **HEADS}, layer_types=kinds))


def capped() -> Any:
    """Gemma 2 caps its logits and every second layer sees a window only."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, sliding_window=8, final_logit_softcapping=2.0))


def scaled() -> Any:
    """Granite divides its logits; nothing in its attention is unlike Llama's."""
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**SIZES, **HEADS, logits_scaling=3.0))


def biased() -> Any:
    """Bloom's attention knows positions by ALiBi, and it takes no position ids."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(**{k: v for k, v in SIZES.items() if "num_" not in k}, n_layer=2, n_head=2))


def recurrent() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SIZES, state_size=4))


def unpassed() -> Any:
    """StableLM's layers hand nothing on to their attention, so it never sees a trunk; its packed tree is right."""
    from transformers import StableLmConfig, StableLmForCausalLM

    return StableLmForCausalLM(StableLmConfig(**SIZES, **{k: v for k, v in HEADS.items() if k != "head_dim"}))


def latent() -> Any:
    """DeepSeek's keys are wider than its values, and neither is as wide as its configuration says."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {k: v for k, v in HEADS.items() if k != "head_dim"} | {"num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    ranks = {"topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **heads, **experts, **ranks, **widths))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


OTHERS = {
    windowed: "layers of other kinds than full attention (a sliding window)",
    capped: "layers of other kinds than full attention (full_attention, sliding_attention)",
    scaled: "its logits on a packed tree of tokens are off by ",
    biased: "",
    recurrent: "",
    unpassed: "a packed tree of tokens or a trunk (its layers do not hand the trunk on to their attention)",
    latent: "it does not take a packed tree of tokens or a trunk (The expanded size of the tensor (8) must match",
}


def saved(make: Any, folder: Path) -> str:
    torch.manual_seed(0)
    make().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def drawn(folder: str, context_length: int = 2048) -> list[Row]:
    engine = LocalEngine(load(folder, context_length=context_length), chat_template=False)
    turns = (("Question 1 + 2?\n", "a"), ("Question 1 + 2?\n", "Result 3\n", "b"))
    requests = [
        GenerateRequest(
            (Message("user", parts),), Sampling(1.0, max_tokens=6, seed=seed), 'start: "x" /[a-c]{4}/ "y"\n'
        )
        for seed in range(3)
        for parts in turns
    ]

    async def together() -> Any:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    found = asyncio.run(together())
    engine.close()
    assert all(one.text[0] == "x" and one.text[-1] == "y" and len(one.ids) == 6 for one in found)
    return [
        Row(
            one.prompt_ids,
            one.ids,
            one.logprobs,
            one.forced,
            1.0,
            requests[0].grammar,
            advantage=(-1.0, 1.7, 0.4)[number // 2],
            weight=1 / 24,
            trajectory=number // 2,
        )
        for number, one in enumerate(found)
    ]


def literal(folder: str, rows: list[Row]) -> list[float]:
    """Log-probs of the unforced ids by transformers alone, in its default attention, a full forward a token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in rows:
        for position in (1, 2, 3, 4):
            ids = torch.tensor([row.prompt_ids + row.ids[:position]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -1]
            letters = torch.tensor(byte_tokenizer().convert_tokens_to_ids(["a", "b", "c"]))
            found.append(float(logits[row.ids[position]] - logits[letters].logsumexp(0)))
    return found


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_they_are_named_and_drawn_and_trained_by_their_own_forward(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(make, tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert not is_ours(loaded.model)
    (record,) = [one for one in caplog.records if one.name.startswith("midflight")]
    assert record.getMessage().startswith(f"model.name={folder}: one request and one row at a time, since ")
    assert OTHERS[make] in record.getMessage()
    rows = drawn(folder)
    free = [value for row in rows for value, forced in zip(row.logprobs, row.forced, strict=True) if not forced]
    assert free == pytest.approx(literal(folder, rows), abs=1e-4)
    policy = Policy(loaded, lora=None if make is recurrent else (4, 8.0), reference=False, seed=0)  # as PEFT has it
    sampler = load(folder).model
    policy.write(sampler)
    engine = LocalEngine(load(folder), chat_template=False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    updater = Updater(policy, optimizer, sampler, engine.masks, TrainingConfig(kl_beta=0.0))
    metrics = updater.update(rows)
    assert metrics.drift <= 1e-4 and metrics.trained_tokens == 24 and metrics.grad_norm > 0
    assert metrics.unique_tokens == metrics.total_tokens - len(rows)  # the last token of each predicts nothing
    policy.write(sampler)
    after = update.score_rows(sampler, engine.masks, rows_apart(rows))
    gain = sum(
        row.advantage * row.weight * (sum(new) - sum(row.logprobs)) for new, row in zip(after, rows, strict=True)
    )
    assert gain == pytest.approx(0.01 * min(metrics.grad_norm, 1.0) * metrics.grad_norm, rel=0.05)  # to first order
    engine.close()


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_their_logits_exist_a_chunk_at_a_time(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(make, tmp_path)
    model = load(folder).model
    engine = LocalEngine(load(folder), chat_template=False)
    rows = [Row(tuple(range(5, 12)), tuple(range(40, 52)), (0.0,) * 12, (False,) * 12, 1.0, None)]
    asked: list[int] = []
    real = update.logits_of

    def watched(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        return real(model, hidden)

    monkeypatch.setattr(update, "logits_of", watched)
    monkeypatch.setattr(update, "SCORED_AT_ONCE", 5)
    found = update.score_rows(model, engine.masks, rows_apart(rows))
    assert asked == [5, 5, 2] and "forward" not in vars(model.base_model)
    monkeypatch.setattr(update, "gives_hidden", lambda model: False)
    whole = update.score_rows(model, engine.masks, rows_apart(rows))
    assert found[0] == pytest.approx(whole[0], abs=1e-5) and asked == [5, 5, 2]
    engine.close()


def test_llama_takes_ours_and_both_ways_agree(tmp_path: Path) -> None:
    folder = saved(llama, tmp_path)
    loaded = load(folder)
    assert is_ours(loaded.model)
    rows = drawn(folder)
    engine = LocalEngine(loaded, chat_template=False)
    packed = update.score_rows(loaded.model, engine.masks, pack_rows(rows, 64))
    loaded.model.set_attn_implementation("sdpa")
    apart = update.score_rows(loaded.model, engine.masks, rows_apart(rows))
    for ours, theirs, row in zip(packed, apart, rows, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert ours == pytest.approx(row.logprobs, abs=1e-5)
    engine.close()


def test_a_window_as_long_as_the_context_hides_nothing(tmp_path: Path) -> None:
    for make in (windowed, mixed):
        folder = saved(make, tmp_path / make.__name__)
        assert not is_ours(load(folder, context_length=9).model)
        assert is_ours(load(folder, context_length=8).model)


def test_a_mistral_within_its_window_is_drawn_and_scored_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HEADS, "sliding_window", 64)
    folder = saved(mixed, tmp_path)
    loaded = load(folder, context_length=64)
    rows = drawn(folder, 64)
    free = [value for row in rows for value, forced in zip(row.logprobs, row.forced, strict=True) if not forced]
    assert free == pytest.approx(literal(folder, rows), abs=1e-4)
    engine = LocalEngine(loaded, chat_template=False, context_length=64)
    for ours, row in zip(update.score_rows(loaded.model, engine.masks, pack_rows(rows, 64)), rows, strict=True):
        assert ours == pytest.approx(row.logprobs, abs=1e-5)
    engine.close()


@pytest.mark.parametrize("where", ["make_trunk", "_packed_logits"])
def test_memory_that_runs_out_says_nothing_about_a_model(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    folder = saved(llama, tmp_path)
    monkeypatch.setattr(support, where, full)
    with pytest.raises(ModelError) as caught:
        load(folder, device="cpu")
    assert str(caught.value) == (
        f"model.name={folder}: out of memory on cpu (CUDA out of memory. Tried to allocate 2.00 GiB.); make room "
        "there, or set another model.device"
    )


def test_in_16_bits_the_same_models_take_ours(tmp_path: Path) -> None:
    for make, takes in ((llama, True), (unpassed, False)):
        folder = saved(make, tmp_path / make.__name__)
        assert is_ours(load(folder, dtype="bfloat16").model) is takes


def test_logits_behind_a_trunk_that_are_off_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, right = saved(llama, tmp_path), support._drawn_logits
    monkeypatch.setattr(support, "_drawn_logits", lambda *given: right(*given) * 1.01)
    model = load(folder).model
    assert not is_ours(model)
    assert support.adopt(model) == "its logits behind a trunk are off by 1.0% of the largest"


def test_a_pack_that_cannot_hold_a_row_is_refused_before_any_work(tmp_path: Path) -> None:
    @tool
    def pick(text: str) -> str:
        """Pick."""
        return text

    folder = saved(windowed, tmp_path / "model")
    settings = ["training.pack_tokens=100", "model.chat_template=false"]
    recipe = recipe_for([pick], name="tiny", model=folder, steps=1, max_turns=1, overrides=settings)
    with pytest.raises(UserError) as caught:
        train(recipe, tmp_path / "run", tools=[pick], tasks=[Task("q", "?", "a")])
    assert str(caught.value) == (
        "training.pack_tokens = 100: a row of this model goes through it whole, and may have 512 tokens; "
        "set training.pack_tokens=512, or model.context_length=100"
    )
