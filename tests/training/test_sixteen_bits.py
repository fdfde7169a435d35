"""Training in bfloat16: an update that its weights are too coarse for is not lost, in the trainer or in the sampler."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.api import recipe_for
from midflight.engines.local import LocalEngine, load
from midflight.engines.local.beside import BesideLinear
from midflight.errors import UserError
from midflight.loading import load_trained
from midflight.recipe import Recipe
from midflight.recipe.config import TrainingConfig
from midflight.store.seals import seal
from midflight.training import update
from midflight.training.packing import Row, pack_rows
from midflight.training.policy import Policy
from midflight.training.step import Updater
from tests.training.test_trainer import numbers, pick, run
from tests.training.tiny import byte_tokenizer, make_byte_model

pytestmark = pytest.mark.model

SETTINGS = TrainingConfig(kl_beta=0.0, max_drift=1.0, max_grad_norm=1e9)
HALF = ["model.dtype=bfloat16", "model.chat_template=false", "training.max_drift=1.0"]
IDS = torch.arange(1, 41)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights bfloat16 holds as they are, so that both dtypes begin as one."""
    return str(make_byte_model(tmp_path_factory.mktemp("halves"), hidden=64, dtype="bfloat16"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Any:
    made = LocalEngine(load(folder, dtype="bfloat16"), chat_template=False)
    yield made
    made.close()


def recipe_of(model: str | Path, *overrides: str) -> Recipe:
    settings = [*HALF, *overrides]
    return recipe_for([pick], name="tiny", model=str(model), steps=3, max_turns=1, overrides=settings)


def policy_of(folder: str, lora: tuple[int, float] | None, dtype: str = "bfloat16") -> Policy:
    return Policy(load(folder, dtype=dtype), lora=lora, reference=False, seed=0)


@torch.no_grad()
def stir(policy: Policy, scale: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    policy.settle()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def rows_of(count: int) -> list[Row]:
    draws = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draws.randrange(1, 257) for _ in range(length))

    return [
        Row(
            ids(12),
            ids(16),
            (0.0,) * 16,
            (False,) * 16,
            1.0,
            None,
            advantage=1.0,
            weight=1 / (16 * count),
            trajectory=n,
        )
        for n in range(count)
    ]


def moved(folder: str, engine: LocalEngine, dtype: str) -> torch.Tensor:
    """By how much the sampler's log-probs of the rows' tokens rise in one small update that raises them."""
    rows = rows_of(64)
    policy, sampler = policy_of(folder, (4, 8.0), dtype), load(folder, dtype=dtype).model
    policy.write(sampler)
    batch = pack_rows(rows, 4096)
    before = update.score_rows(sampler, engine.masks, batch)
    drawn = [replace(row, logprobs=values) for row, values in zip(rows, before, strict=True)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
    Updater(policy, optimizer, sampler, engine.masks, SETTINGS).update(drawn)
    policy.write(sampler)
    return torch.tensor(update.score_rows(sampler, engine.masks, batch)) - torch.tensor(before)


def test_a_small_update_of_an_adapter_moves_the_sampler_as_in_float32(folder: str, engine: LocalEngine) -> None:
    """Of the update nothing would be left were it merged into the weights: each of its entries is below their steps."""
    right, found = (moved(folder, engine, dtype) for dtype in ("float32", "bfloat16"))
    noise = float(found.std()) / found.numel() ** 0.5
    assert float(right.mean()) > 9e-4 > 3 * noise
    assert float(found.mean()) == pytest.approx(float(right.mean()), abs=2 * noise)
    share = float((found * right).sum() / right.square().sum())  # of the movement, token by token
    assert share == pytest.approx(1.0, abs=2 * float(found.std() / right.norm()))


def test_sampler_and_trainer_are_one_to_the_bit_and_a_stale_one_is_not(folder: str) -> None:
    policy = policy_of(folder, (4, 8.0))
    sampler = LocalEngine(load(folder, dtype="bfloat16"), chat_template=False)
    assert policy.sync(sampler, 1) == 0.0
    before = logits(sampler.model)
    stir(policy, 0.01)
    assert policy.sync(sampler, 2) == 0.0
    maps = [part for part in sampler.model.modules() if isinstance(part, BesideLinear)]
    assert len(maps) == 14
    assert {part.weight.shape[1] - part.in_features for part in maps} == {8}  # a rank of 4, filled up
    assert not torch.equal(logits(sampler.model), before)
    with policy.frozen() as base:
        assert torch.equal(logits(base), before)
    sampler.close()


def test_gradients_are_those_of_float32_also_through_a_map_with_an_adapter_already(
    folder: str, engine: LocalEngine, tmp_path: Path
) -> None:
    """What an earlier run trained is beside the weights too, and the next adapter beside both."""
    first = policy_of(folder, (4, 8.0))
    stir(first, 0.05)
    first.save(tmp_path)
    found = {}
    for dtype in ("float32", "bfloat16"):
        recipe = recipe_of(tmp_path, f"model.dtype={dtype}")
        policy = Policy(load_trained(recipe, str(tmp_path), print)[0], lora=(2, 6.0), reference=False, seed=0)
        stir(policy, 0.05, seed=1)
        sampler = load_trained(recipe, str(tmp_path), print)[0].model
        policy.write(sampler)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        Updater(policy, optimizer, sampler, engine.masks, SETTINGS.model_copy(update={"max_drift": 1e3})).update(
            rows_of(8)
        )
        assert all(p.dtype == torch.float32 for p in policy.parameters())
        found[dtype] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert float((found["bfloat16"] - found["float32"]).norm() / found["float32"].norm()) < 0.03
    maps = [part for part in sampler.modules() if isinstance(part, BesideLinear)]
    assert {part.weight.shape[1] - part.in_features for part in maps} == {16}


def test_without_an_adapter_steps_below_the_weights_own_add_up(folder: str, engine: LocalEngine) -> None:
    """Adam's first step moves each master by the rate; the weights are the masters, rounded."""
    policy, sampler = policy_of(folder, None), load(folder, dtype="bfloat16").model
    masters = policy.parameters()
    before = torch.cat([parameter.detach().flatten() for parameter in masters])
    optimizer = torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0)
    updater = Updater(policy, optimizer, sampler, engine.masks, SETTINGS.model_copy(update={"max_drift": 1e3}))
    for _ in range(3):
        updater.update(rows_of(8))
    after = torch.cat([parameter.detach().flatten() for parameter in masters])
    assert float((after - before).abs().median()) == pytest.approx(3e-6, rel=0.05)
    weights = torch.cat([parameter.detach().flatten() for parameter in policy.causal.parameters()])
    assert torch.equal(weights, after.bfloat16())
    assert float((weights.float() != before).float().mean()) < 0.05  # of themselves nearly none would have moved
    assert all(parameter.grad is None for parameter in policy.causal.parameters())


@pytest.mark.parametrize("lora", [(4, 8.0), None], ids=["lora", "full"])
def test_what_is_saved_is_what_was_trained(folder: str, tmp_path: Path, lora: tuple[int, float] | None) -> None:
    policy = policy_of(folder, lora)
    stir(policy, 1e-4)
    policy.save(tmp_path)
    seal(tmp_path, {"step": 1, "quality": 0.0, "base": folder})
    sampler = load(folder, dtype="bfloat16").model
    policy.write(sampler)
    kept = [parameter.detach().clone() for parameter in policy.parameters()]
    expected = logits(sampler)
    stir(policy, 1e-2, seed=1)
    policy.load(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(policy.parameters(), kept, strict=True))
    policy.write(sampler)
    assert torch.equal(logits(sampler), expected)
    recipe = recipe_of(folder)
    again, root = load_trained(recipe, str(tmp_path), print)
    assert root == folder and torch.equal(logits(again.model), expected)


def test_all_weights_can_train_on_from_an_adapter(folder: str, tmp_path: Path) -> None:
    """It is added to the masters, not to the rounded weights."""
    first = policy_of(folder, (4, 8.0))
    stir(first, 1e-3)
    first.save(tmp_path)
    recipe = recipe_of(tmp_path)
    policy = Policy(load_trained(recipe, str(tmp_path), print)[0], lora=None, reference=False, seed=0)
    layer = first.causal.model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    names = [name for name, _ in policy.causal.named_parameters()]
    master = policy.parameters()[names.index("model.layers.0.mlp.up_proj.weight")]
    gap, rounding = (float((one - exact).detach().abs().max()) for one in (master, exact.bfloat16()))
    assert gap < 1e-5 < 1e-4 < rounding
    sampler = LocalEngine(load_trained(recipe, str(tmp_path), print)[0], chat_template=False)
    assert policy.sync(sampler, 1) == 0.0
    sampler.close()


def test_an_adapter_on_maps_that_are_not_linear_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        policy_of(str(tmp_path), (4, 8.0))
    assert str(caught.value) == (
        "model.dtype = bfloat16: transformer.h.0.attn.c_attn is a Conv1D, in whose weights the adapter's steps would "
        "be lost by rounding; set model.dtype=float32, or model.lora=null"
    )


@pytest.mark.parametrize("lora", ["model.lora.rank=4", "model.lora=null"])
def test_a_run_that_was_cut_off_resumes_with_the_same_numbers(
    folder: str, tmp_path: Path, lora: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [lora, "training.queries_per_step=4", "training.save_every=1", "training.learning_rate=1e-3"]
    recipe = recipe_of(folder, *settings)
    undisturbed = run(recipe, tmp_path / "one")
    assert all(record["trained_tokens"] and record["grad_norm"] for record in undisturbed)
    real, calls = Updater.update, []

    def interrupted(*arguments: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **given)

    monkeypatch.setattr(Updater, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "two")
    assert numbers(run(recipe, tmp_path / "two", resume=True)) == numbers(undisturbed)
    for file in ("model.safetensors", "adapter_model.safetensors", "optimizer.pt"):
        one, two = (tmp_path / name / "checkpoints" / "step-00003" / file for name in ("one", "two"))
        assert one.is_file() == two.is_file() and (not one.is_file() or one.read_bytes() == two.read_bytes())
