"""The updater on a tiny model: every objective against the oracle, mini-batches, truncation, memory, bad gradients."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.engines.base import GenerateRequest, Message, Sampling
from midflight.engines.local import LocalEngine, load
from midflight.recipe.config import TrainingConfig
from midflight.training import step, update
from midflight.training.drift import DriftError
from midflight.training.packing import Row
from midflight.training.policy import Policy
from midflight.training.step import GradientError, OutOfMemory, Updater, mini_batches
from tests.training import oracle

pytestmark = pytest.mark.model

GRAMMAR = 'start: " " ("add: " ARGUMENT | "finish") "\\n"\nARGUMENT: /[0-9+ ]{1,12}/\n'


class Still(torch.optim.SGD):
    """Moves nothing, so that the gradients stay to be looked at."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    made = LocalEngine(load(str(model)), chat_template=False)
    yield made
    made.close()


def draw(engine: LocalEngine, sampling: Sampling, grammar: str | None = GRAMMAR, members: int = 3) -> list[Row]:
    """Two turns of a few trajectories, as rows."""
    turns = (("Question: 1 + 2?\n", "Turn 1:"), ("Question: 1 + 2?\n", "Turn 1: add: 1 + 2\nResult: 3\n", "Turn 2:"))
    requests = [
        GenerateRequest((Message("user", parts),), replace(sampling, seed=seed), grammar)
        for seed in range(members)
        for parts in turns
    ]

    async def together() -> Any:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return [
        Row(
            prompt_ids=drawn.prompt_ids,
            ids=drawn.ids,
            logprobs=drawn.logprobs,
            forced=drawn.forced,
            temperature=sampling.temperature,
            grammar=grammar,
            supports=drawn.supports,
            advantage=(-1.0, 1.7, 0.4)[number // 2 % 3],
            weight=1 / (members * 2 * drawn.forced.count(False)),
            trajectory=number // 2,
        )
        for number, drawn in enumerate(asyncio.run(together()))
    ]


def policy_of(model: Path, lora: tuple[int, float] | None = (4, 8.0)) -> Policy:
    policy = Policy(load(str(model)), lora=lora, reference=True, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def updater_of(policy: Policy, engine: LocalEngine, optimizer: Any = None, **settings: Any) -> Updater:
    sampler = load(policy.base_name).model
    policy.write(sampler)
    chosen = TrainingConfig(**{"max_drift": 1e9, "max_grad_norm": 1e9, "kl_beta": 0.0, **settings})
    return Updater(policy, optimizer or Still(policy.parameters()), sampler, engine.masks, chosen)


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def unsettled(rows: list[Row]) -> list[Row]:
    """Log-probs moved off the policy, so that ratios and clips matter."""
    noise = random.Random(0)
    return [replace(row, logprobs=tuple(value + noise.uniform(-0.5, 0.5) for value in row.logprobs)) for row in rows]


OBJECTIVES = [
    {"loss": "ppo_clip", "clip_epsilon_high": 0.3, "dual_clip": 1.2},
    {"loss": "gspo"},
    {"loss": "cispo"},
    {"loss": "reinforce"},
    {"loss": "ppo_clip", "kl_beta": 0.05, "kl_estimate": "k2", "entropy_beta": 0.03},
    {"loss": "ppo_clip", "importance_cap": 1.1},
    {"loss": "gspo", "importance_cap": 1.1},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("chunk", [128, 2])
def test_each_objective_equals_the_oracle_in_packs_and_chunks(
    model: Path, engine: LocalEngine, objective: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the oracle's on the trainer's own log-probs; its gradient does not depend on packs or chunks."""
    monkeypatch.setattr(update, "SCORED_AT_ONCE", chunk)
    rows = unsettled(draw(engine, Sampling(temperature=1.2, max_tokens=12)))
    policy = policy_of(model)
    whole = updater_of(policy, engine, **objective)
    rows = whole.with_reference(rows)
    metrics = whole.update(rows)
    expected = gradients(policy).clone()
    with torch.no_grad():
        batch = step.pack_rows(rows, 4096)
        new = update.score_rows(whole.sampler, engine.masks, batch)

    def turn(row: Row, scored: tuple[float, ...]) -> oracle.Turn:
        free = [index for index, forced in enumerate(row.forced) if not forced]
        assert row.reference is not None
        tokens = [oracle.Token(scored[i], row.logprobs[i], row.reference[i], 0.0, scored[i]) for i in free]
        return oracle.Turn(tokens)

    pairs = list(zip(rows, new, strict=True))
    group = [oracle.Trajectory(0.0, [turn(*pair) for pair in pairs[i : i + 2]]) for i in range(0, len(pairs), 2)]
    literal = oracle.loss(
        [group],
        [[[rows[i].advantage] * 2 for i in range(0, len(rows), 2)]],
        surrogate=objective["loss"],
        high=objective.get("clip_epsilon_high", 0.2),
        dual=objective.get("dual_clip"),
        kl_name=objective.get("kl_estimate", "k3"),
        kl_beta=objective.get("kl_beta", 0.0),
        cap=objective.get("importance_cap"),
    )
    assert metrics.loss + objective.get("entropy_beta", 0.0) * metrics.entropy == pytest.approx(literal, abs=1e-5)
    assert metrics.trained_tokens == sum(row.forced.count(False) for row in rows)
    small = updater_of(policy, engine, pack_tokens=64, **objective)
    small.pack_tokens = 24
    small.update(random.Random(1).sample(rows, len(rows)))
    assert gap(gradients(policy), expected) < 1e-5


@pytest.mark.parametrize("lora", [(4, 8.0), None], ids=["lora", "full"])
def test_the_mean_gradient_of_mini_batches_is_that_of_the_batch(
    model: Path, engine: LocalEngine, lora: tuple[int, float] | None
) -> None:
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12), members=4)
    policy = policy_of(model, lora)
    updater_of(policy, engine).update(rows)
    expected = gradients(policy).clone()
    parts = mini_batches(rows, 3, seed=5)
    assert [len({row.trajectory for row in part}) for part in parts] == [2, 1, 1]
    assert sorted(row.trajectory for part in parts for row in part) == [0, 0, 1, 1, 2, 2, 3, 3]
    found = []
    for part in parts:
        updater_of(policy, engine).update(part)
        found.append(gradients(policy).clone())
    assert gap(torch.stack(found).mean(0), expected) < 1e-5
    assert mini_batches(rows, 3, seed=5) == parts != mini_batches(rows, 3, seed=6)
    assert len(mini_batches(rows[:2], 3, seed=0)) == 1


def test_the_metrics_of_mini_batches_are_the_means_of_rates_and_the_sums_of_counts(
    model: Path, engine: LocalEngine
) -> None:
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12), members=4)
    policy = policy_of(model)
    found = updater_of(policy, engine, mini_batches=3).update(rows, seed=5)
    parts = [updater_of(policy, engine).update(part) for part in mini_batches(rows, 3, seed=5)]
    for name in ("loss", "kl", "entropy"):
        assert getattr(found, name) == pytest.approx(sum(getattr(part, name) for part in parts) / 3, rel=1e-4, abs=1e-7)
    for name in ("trained_tokens", "unique_tokens", "total_tokens", "scored_tokens"):
        assert getattr(found, name) == sum(getattr(part, name) for part in parts) > 0
    assert found.entropy > 0.1 and found.grad_norm == pytest.approx(max(part.grad_norm for part in parts), rel=1e-4)


def test_every_mini_batch_of_every_epoch_is_a_step_on_the_moved_weights(model: Path, engine: LocalEngine) -> None:
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12), members=4)
    policy = policy_of(model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    updater = updater_of(policy, engine, optimizer, mini_batches=2, epochs=3)
    metrics = updater.update(rows)
    assert len(steps) == 6
    assert metrics.scored_tokens == 3 * metrics.trained_tokens == 3 * sum(row.forced.count(False) for row in rows)
    assert metrics.ratio_max > 1.001


@pytest.mark.parametrize("grammar", [GRAMMAR, None])
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.6}, {"top_k": 5}, {"top_p": 0.9, "top_k": 40}, {}], ids=["p", "k", "both", "none"]
)
def test_sampler_and_trainer_agree_on_truncated_distributions(
    model: Path, engine: LocalEngine, grammar: str | None, cut: dict[str, Any]
) -> None:
    rows = draw(engine, Sampling(temperature=0.8, max_tokens=12, **cut), grammar)
    for row in rows:
        assert len(row.supports) == (len(row.ids) if cut else 0)
        for token, forced, support in zip(row.ids, row.forced, row.supports, strict=bool(cut)):
            assert support == () if forced else token in support
            assert len(support) <= cut.get("top_k", 10**6)
    policy = Policy(load(str(model)), lora=(4, 8.0), reference=True, seed=0)
    metrics = updater_of(policy, engine, max_drift=1e-5).update(rows)
    assert metrics.drift <= 1e-5
    assert metrics.drift_cause == ("truncated sampling" if cut else "float32 rounding")
    if cut:
        blind = [replace(row, supports=()) for row in rows]
        with pytest.raises(DriftError, match="sampler and trainer disagree"):
            updater_of(policy, engine, max_drift=1e-5).update(blind)


def test_drift_is_checked_before_the_first_weight_moves_also_with_mini_batches(
    model: Path, engine: LocalEngine
) -> None:
    rows = unsettled(draw(engine, Sampling(temperature=1.2, max_tokens=12), members=4))
    policy = policy_of(model)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    updater = updater_of(policy, engine, optimizer, mini_batches=4, max_drift=0.01)
    with pytest.raises(DriftError, match=r"over training.max_drift = 0.01 \(row \d+, token \d+; float32 rounding\)"):
        updater.update(rows)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), before, strict=True))


@pytest.mark.parametrize("settings", [{}, {"epochs": 2}, {"importance_cap": 2.0}, {"loss": "gspo", "kl_beta": 0.1}])
def test_a_token_that_drifts_alone_is_left_out_as_a_forced_one_would_be(
    model: Path, engine: LocalEngine, settings: dict[str, Any]
) -> None:
    policy = policy_of(model)
    plain = updater_of(policy, engine)
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12))
    true = update.score_rows(plain.sampler, engine.masks, step.pack_rows(rows, 4096))
    rows = [replace(row, logprobs=values, reference=values) for row, values in zip(rows, true, strict=True)]
    place = rows[2].forced.index(False)
    moved = tuple(value + 5e-4 * (index == place) for index, value in enumerate(rows[2].logprobs))
    drifted = [*rows[:2], replace(rows[2], logprobs=moved), *rows[3:]]
    told: list[str] = []
    updater = updater_of(policy, engine, max_drift=1e-4, max_drift_share=0.1, **settings)
    updater.note = told.append
    metrics = updater.update(drifted)
    ours = gradients(policy).clone()
    forced = tuple(flag or index == place for index, flag in enumerate(rows[2].forced))
    expected = [*rows[:2], replace(rows[2], forced=forced), *rows[3:]]
    reference = updater_of(policy, engine, **settings).update(expected)
    assert gap(ours, gradients(policy)) < (1e-3 if settings.get("loss") == "gspo" else 1e-5)
    tokens = sum(row.forced.count(False) for row in rows)
    assert (metrics.drift_left_out, metrics.trained_tokens) == (1, tokens - 1) == (1, reference.trained_tokens)
    assert metrics.drift == pytest.approx(5e-4, rel=1e-2)  # what is left out is reported all the same
    assert len(told) == 1 and told[0].startswith(f"1 of {tokens} tokens left out of the update: log-prob ")
    assert f"(row 2, token {place}; float32 rounding)" in told[0]
    updater = updater_of(policy, engine, max_drift=1e-4, max_drift_share=0.9 / tokens, **settings)
    with pytest.raises(DriftError, match=f"sampler and trainer disagree on 1 of {tokens} tokens: log-prob "):
        updater.update(drifted)
    updater = updater_of(policy, engine, max_drift=4e-5, max_drift_share=0.1, **settings)
    with pytest.raises(DriftError, match="sampler and trainer disagree: log-prob "):
        updater.update(drifted)


def test_importance_weights_correct_for_another_sampler_up_to_the_cap(model: Path, engine: LocalEngine) -> None:
    """Tokens drawn with half the probability count twice, or as the cap allows; the ratio itself starts at 1."""
    policy = policy_of(model)
    plain = updater_of(policy, engine)
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12))
    true = update.score_rows(plain.sampler, engine.masks, step.pack_rows(rows, 4096))
    fresh = [replace(row, logprobs=values) for row, values in zip(rows, true, strict=True)]
    plain.update(fresh)
    expected = gradients(policy).clone()
    shifted = [replace(row, logprobs=tuple(value - 0.6931472 for value in row.logprobs)) for row in fresh]
    for cap, factor in ((10.0, 2.0), (1.5, 1.5)):
        metrics = updater_of(policy, engine, importance_cap=cap).update(shifted)
        assert gap(gradients(policy), factor * expected) < 1e-5
        assert metrics.drift == pytest.approx(0.6931, abs=1e-3)
        assert metrics.ratio_max == pytest.approx(1.0, abs=1e-5)


def test_flex_attention_scores_as_sdpa_does(model: Path, engine: LocalEngine) -> None:
    """Its kernels are for CUDA; here its reference runs, which shows that the block mask is the tree's."""
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12))
    model = load(str(model)).model
    for budget in (64, 4096):
        batch = step.pack_rows(rows, budget)
        plain = update.score_rows(model, engine.masks, batch)
        for ours, theirs in zip(update.score_rows(model, engine.masks, batch, flex=True), plain, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_out_of_memory_halves_the_packs_and_goes_on(
    model: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = tuple(range(1, 251))
    rows = [replace(row, prompt_ids=common + row.prompt_ids) for row in draw(engine, Sampling(max_tokens=12))]
    policy = policy_of(model)
    updater_of(policy, engine).update(rows)
    expected = gradients(policy).clone()
    (whole,) = step.pack_rows(rows, 4096).packs
    real = step.run

    def short(model: Any, masks: Any, batch: Any, on_scores: Any, **settings: Any) -> None:
        real(model, masks, batch, on_scores, **settings)  # it fails late: gradients are there already
        if max(len(pack.ids) for pack in batch.packs) > 150:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried")

    monkeypatch.setattr(step, "run", short)
    notes: list[str] = []
    updater = updater_of(policy, engine, pack_tokens=4096)
    updater.note = notes.append
    metrics = updater.update(rows)
    assert gap(gradients(policy), expected) < 1e-5
    half = len(whole.ids) // 2  # of what the largest pack had, not of what it might have had
    assert 150 < half < 300
    assert notes == [
        f"out of memory in the update: going on with training.pack_tokens = {size}" for size in (half, half // 2)
    ]
    assert metrics.pack_tokens == updater.pack_tokens == half // 2
    assert metrics.trained_tokens == sum(row.forced.count(False) for row in rows)

    def never(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "run", never)
    with pytest.raises(OutOfMemory, match="out of memory with packs of up to 64 tokens: CUDA out of memory; use a sm"):
        updater.update(rows)

    def wrong(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(step, "run", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        updater.update(rows)


def test_out_of_memory_with_rows_that_cannot_be_cut_ends_at_once(
    model: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = draw(engine, Sampling(max_tokens=12))
    updater = updater_of(policy_of(model), engine)
    updater.sampler.set_attn_implementation("sdpa")  # as one that runs on its own forward
    longest = max(len(row.prompt_ids) + len(row.ids) for row in rows) - 1
    tries = []

    def never(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "run", never)
    told = rf"^out of memory with rows of up to {longest} tokens, which this model takes whole: CUDA out of memory; use"
    with pytest.raises(OutOfMemory, match=told):
        updater.update(rows)
    assert len(tries) == 1


def test_an_update_without_a_finite_gradient_is_skipped_and_the_third_in_a_row_stops(
    model: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    rows = draw(engine, Sampling(temperature=1.2, max_tokens=12))
    broken = [replace(rows[0], weight=float("inf")), *rows[1:]]
    policy = policy_of(model)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    updater = updater_of(policy, engine, torch.optim.SGD(policy.parameters(), lr=0.1))
    notes: list[str] = []
    updater.note, updater.rescue = notes.append, tmp_path
    for _ in range(2):
        assert updater.update(broken).skipped_updates == 1
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), before, strict=True))
    assert updater.update(rows).skipped_updates == 0  # the count starts over
    for part in (broken[:1], broken[:2]):
        updater.policy.write(updater.sampler)
        updater.update(part)
    with pytest.raises(GradientError, match=r"not finite in 3 updates in a row; their rows are in .*\.jsonl; look"):
        updater.update(broken)
    saved = [json.loads(line) for line in (tmp_path / "rows_without_gradient.jsonl").read_text().splitlines()]
    expected = [(number, row.ids) for number, part in enumerate((rows[:1], rows[:2], rows)) for row in part]
    assert [(row["update"], tuple(row["ids"])) for row in saved] == expected
    assert len(notes) == 5 and updater.skipped_in_a_row == 3
    updater.skipped_in_a_row = 2  # as after a resume, which has not got their rows
    with pytest.raises(GradientError, match=r"in a row; the rows of the last 1, since the resume, are in .*\.jsonl;"):
        updater.update(broken[:1])
