"""Update, policy and trainer on the embedded model, against plain forwards and literal loops."""

import asyncio
import math
import random

import pytest
import torch

from midflight.api import train_on
from midflight.engines.base import GenerateRequest, Message, Sampling
from midflight.engines.local import EMBEDDED, LocalEngine, load
from midflight.loading import load_trained
from midflight.recipe import load_recipe
from midflight.recipe.config import TrainingConfig
from midflight.store import Store
from midflight.store.metrics import read_metrics
from midflight.store.seals import seal
from midflight.tasks.base import Task
from midflight.tools import tool
from midflight.training import step as training
from midflight.training.packing import Row, pack_rows
from midflight.training.policy import Policy, SyncError
from midflight.training.step import Updater

pytestmark = pytest.mark.model

GRAMMAR = 'start: " " ("add: " ARGUMENT | "finish") "\\n"\nARGUMENT: /[0-9+ ]{1,12}/\n'
SETTINGS = TrainingConfig(kl_beta=0.05, entropy_beta=0.02, max_drift=1e9, max_grad_norm=1e9)


class Still:
    """An optimizer that moves nothing, so that the gradients stay to be looked at."""

    def __init__(self, parameters):
        self.parameters = parameters

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        pass


@pytest.fixture(scope="module")
def engine():
    made = LocalEngine(load(EMBEDDED), chat_template=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows(engine):
    """Two turns of a few trajectories, with log-probs moved off the policy so that ratios and clipping matter."""
    noise = random.Random(0)
    turns = (("Question: 1 + 2?\n", "Turn 1:"), ("Question: 1 + 2?\n", "Turn 1: add: 1 + 2\nResult: 3\n", "Turn 2:"))
    requests = [
        GenerateRequest(
            (Message("system", ("Tools: add, finish\n",)), Message("user", parts)),
            Sampling(temperature=1.2, max_tokens=8, seed=seed),
            GRAMMAR,
        )
        for parts in turns
        for seed in range(2)
    ]

    async def together():
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    made = []
    for number, drawn in enumerate(asyncio.run(together())):
        free = drawn.forced.count(False)
        made.append(
            Row(
                prompt_ids=drawn.prompt_ids,
                ids=drawn.ids,
                logprobs=tuple(value + noise.uniform(-0.4, 0.4) for value in drawn.logprobs),
                forced=drawn.forced,
                temperature=1.2,
                grammar=GRAMMAR,
                advantage=(-1.0, 1.7, 0.4)[number % 3],
                weight=1 / (2 * 2 * free),
            )
        )
    assert any(any(row.forced) for row in made), "a turn with a forced token is among them"
    return made


def policy_of(lora, seed=0):
    policy = Policy(load(EMBEDDED), lora=lora, reference=True, seed=seed)
    stir(policy, 0.02 if lora else 0.001)
    return policy


@torch.no_grad()
def stir(policy, scale, seed=0):
    """Move the policy off its reference, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def distributions(model, masks, row):
    """Log-probs [len(ids), vocabulary] from one full forward of one row."""
    logits = model(input_ids=torch.tensor([row.prompt_ids + row.ids])).logits[0, len(row.prompt_ids) - 1 : -1].float()
    blocked = ~masks.replay(row.grammar, row.ids)
    return (logits / row.temperature).masked_fill(blocked, -torch.inf).log_softmax(-1)


def literal_gradients(policy, masks, rows):
    """The formula of REFERENCE token by token and row by row, without packing."""
    for parameter in policy.parameters():
        parameter.grad = None
    for row in rows:
        with torch.no_grad(), policy.frozen() as model:
            reference = distributions(model, masks, row)
        found = distributions(policy.causal, masks, row)
        objective = torch.zeros(())
        for j, token in enumerate(row.ids):
            if row.forced[j]:
                continue
            new = found[j, token]
            rho = torch.exp(new - row.logprobs[j])
            surrogate = torch.minimum(rho * row.advantage, rho.clamp(0.8, 1.2) * row.advantage)
            gap = reference[j, token] - new
            k3 = torch.exp(gap) - gap - 1
            alive = found[j][found[j] > -torch.inf]
            entropy = -(alive.exp() * alive).sum()
            objective = objective + row.weight * (surrogate - SETTINGS.kl_beta * k3 + SETTINGS.entropy_beta * entropy)
        (-objective).backward()
    return gradients(policy)


def packed_gradients(policy, masks, rows, budget):
    sampler = load(EMBEDDED).model  # merged weights: with an adapter, the update runs on these
    policy.write(sampler)
    settings = SETTINGS.model_copy(update={"pack_tokens": budget})
    updater = Updater(policy, Still(policy.parameters()), sampler, masks, settings)
    metrics = updater.update(updater.with_reference(rows))
    assert "forward" not in vars(sampler.model.layers[0].self_attn.q_proj)
    return gradients(policy), metrics


def gradients(policy):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def relative(ours, theirs):
    """|ours - theirs| / |theirs| over all parameters."""
    gap = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True)))
    return gap / math.sqrt(sum(float(b.double().square().sum()) for b in theirs))


@pytest.mark.parametrize("lora", [(4, 8.0), None], ids=["lora", "full"])
def test_the_packed_gradient_is_that_of_a_plain_loop(engine, rows, lora):
    policy = policy_of(lora)
    expected = literal_gradients(policy, engine.masks, rows)
    whole, metrics = packed_gradients(policy, engine.masks, rows, 4096)
    assert relative(whole, expected) < 1e-5
    assert metrics.trained_tokens == sum(row.forced.count(False) for row in rows)
    assert metrics.clipped > 0 and metrics.kl > 0
    shuffled = random.Random(1).sample(rows, len(rows))
    cut, again = packed_gradients(policy, engine.masks, shuffled, 24)
    assert len(pack_rows(shuffled, 24).packs) > 1
    assert relative(cut, expected) < 1e-5
    assert again.loss == pytest.approx(metrics.loss, abs=1e-5)


def test_a_second_epoch_scores_with_the_moved_weights(engine, rows):
    settings = SETTINGS.model_copy(update={"epochs": 2})
    ratios = {}
    for rate in (0.0, 0.5):
        policy = policy_of((4, 8.0))
        sampler = load(EMBEDDED).model
        policy.write(sampler)
        optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
        metrics = Updater(policy, optimizer, sampler, engine.masks, settings).update(rows)
        assert metrics.scored_tokens == 2 * metrics.trained_tokens
        ratios[rate] = metrics.ratio_max
    assert ratios[0.5] > ratios[0.0] + 0.01


def plain_logprobs(model, row):
    """Log-probs of a row's ids without rules."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.prompt_ids + row.ids])).logits[0, len(row.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None])[:, 0]


def test_sync_brings_the_sampler_to_the_trainers_weights_and_a_stale_one_is_caught(rows):
    policy = policy_of((4, 8.0))
    sampler = LocalEngine(load(EMBEDDED), chat_template=False)
    with pytest.raises(SyncError, match=r"log-probs differ by .*, bound 0.0001"):
        policy.probe(sampler, 1e-4)
    assert policy.sync(sampler, 3) <= 1e-4
    assert sampler.weights_version == 3
    assert torch.allclose(plain_logprobs(policy.causal, rows[0]), plain_logprobs(sampler.model, rows[0]), atol=1e-4)
    with policy.frozen() as model:
        assert not torch.allclose(plain_logprobs(model, rows[0]), plain_logprobs(sampler.model, rows[0]), atol=1e-2)
    stir(policy, 0.02, seed=1)  # an update without a sync
    with pytest.raises(SyncError):
        policy.probe(sampler, 1e-4)
    assert policy.sync(sampler, 4) <= 1e-4
    sampler.close()


@pytest.mark.parametrize("lora", [(4, 8.0), None], ids=["lora", "full"])
def test_what_is_saved_is_loaded_bit_for_bit_and_solves_as_trained(tmp_path, rows, lora):
    policy = policy_of(lora)
    policy.save(tmp_path)
    seal(tmp_path, {"step": 1, "quality": 0.0, "base": policy.base_name})  # as the trainer does
    saved = [parameter.detach().clone() for parameter in policy.parameters()]
    expected = plain_logprobs(policy.causal, rows[0])
    stir(policy, 0.02, seed=1)
    assert not torch.equal(plain_logprobs(policy.causal, rows[0]), expected)
    policy.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), saved, strict=True))
    assert torch.equal(plain_logprobs(policy.causal, rows[0]), expected)
    found, base = load_trained(load_recipe("quickstart"), str(tmp_path), print)
    assert base == EMBEDDED
    assert torch.allclose(plain_logprobs(found.model, rows[0]), expected, atol=1e-4)


PRICES = {"bolts": 12, "nuts": 7, "screws": 31, "nails": 42, "hinges": 18, "locks": 9}


@tool(blocking=False)
def stock(item: str) -> int:
    """How many of an item there are."""
    return 1000 + PRICES[item.strip().lower()]


@tool(blocking=False)
def price(item: str) -> int:
    """What an item costs."""
    return PRICES[item.strip().lower()]


ASKED = [Task(item, f"How many {item} are there?", str(1000 + cost), "numeric") for item, cost in PRICES.items()]
SMALL = ["model.chat_template=false", "model.context_length=512", "agent.memory_tokens=64"]


EXAMPLES = "".join(
    f"Question: {question}\nTurn 1: {call}\nResult: 53\nTurn 2: finish\n\n"
    for question, call in (
        ("How much are the tiles?", "price: tiles"),
        ("How many ropes are there?", "stock: ropes"),
        ("How many tiles are there?", "stock: tiles"),
    )
)


def learning(folder, steps):
    (folder / "examples.txt").write_text(EXAMPLES)
    return [
        *SMALL,
        f"agent.planner.examples={folder / 'examples.txt'}",
        f"training.steps={steps}",
        "training.queries_per_step=3",
        "training.group_size=8",
        "training.learning_rate=1e-3",
        "training.kl_beta=0",
        "agent.planner.temperature=1.2",
        "agent.planner.max_tokens=8",
    ]


def test_a_few_updates_teach_the_planner_to_look_up_what_is_asked(tmp_path):
    train_on(ASKED, [stock, price], run_dir=tmp_path / "run", steps=4, max_turns=2, overrides=learning(tmp_path, 4))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 4
    assert metrics[-1]["reward"] >= metrics[0]["reward"] + 0.25
    assert all(record["drift"] <= 5e-6 for record in metrics)  # without `exact` some steps have 1e-5
    assert any(record["trained_tokens"] for record in metrics)


def test_an_interrupt_in_the_update_keeps_the_trajectories_of_the_step(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Updater, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_on(ASKED, [stock, price], run_dir=tmp_path / "run", steps=1, max_turns=2, overrides=learning(tmp_path, 1))
    with Store(tmp_path / "run" / "store.sqlite") as store:
        kept = store.trajectories(store.runs()[-1].id, "train")
    assert len(kept) == 24 and {one.step for one in kept} == {1}
