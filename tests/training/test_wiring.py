"""Settings of the optimizer and the KL reach what they set: runs of a model of a few random weights, looked into."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.progress import Progress
from midflight.store import RunFolder, Store, read_metrics
from midflight.training import step
from midflight.training.packing import Row
from midflight.training.sft import sft
from midflight.training.step import UpdateMetrics, Updater
from midflight.training.trainer import train
from tests.training.test_sft import HELD_OUT, note, teacher
from tests.training.test_sft import recipe as supervised
from tests.training.test_trainer import SAME, TASKS, pick, recipe
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model


@dataclass
class Seen:
    """What a run gave its optimizer and its updates, step by step."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    updates: list[tuple[list[Row], UpdateMetrics]] = field(default_factory=list)

    def of(self, key: str) -> list[Any]:
        return [group[key] for group in self.groups]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    stepped, update = torch.optim.AdamW.step, Updater.update

    def stepping(optimizer: torch.optim.AdamW) -> None:
        (group,) = optimizer.param_groups
        found.groups.append({name: value for name, value in group.items() if name != "params"})
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        found.norms.append(math.sqrt(sum(float((one**2).sum()) for one in gradients)))
        stepped(optimizer)

    def updating(updater: Updater, rows: Sequence[Row], **settings: Any) -> UpdateMetrics:
        measured = update(updater, rows, **settings)
        found.updates.append((list(rows), measured))
        return measured

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    monkeypatch.setattr(Updater, "update", updating)
    monkeypatch.setattr("midflight.training.session.write_plots", lambda folder: [])  # most of such a run's time
    return found


def run(model: Path, folder: Path, *overrides: str, steps: int, resume: bool = False) -> None:
    few = ["model.chat_template=false", "training.queries_per_step=2", "training.learning_rate=0.02", *overrides]
    made = recipe(model, *few, steps=steps)
    train(made, folder, resume=resume, progress=Progress(io.StringIO()), tools=[pick], tasks=TASKS)


def free_gaps(row: Row) -> list[float]:
    """log p(reference) - log p of each trained token, under the weights that drew it."""
    assert row.reference is not None
    return [
        there - here for here, there, forced in zip(row.logprobs, row.reference, row.forced, strict=True) if not forced
    ]


def test_the_optimizers_settings_are_the_recipes(model: Path, tmp_path: Path, seen: Seen) -> None:
    keys = ("warmup_steps=1", "final_rate=0.5", "weight_decay=0.3", "betas=[0.5,0.6]", "max_grad_norm=0.001")
    run(model, tmp_path, *(f"training.{key}" for key in keys), steps=4)
    assert seen.of("lr") == pytest.approx([0.01, 0.02, 0.015, 0.01])
    assert seen.of("betas") == [(0.5, 0.6)] * 4 and seen.of("weight_decay") == [0.3] * 4
    assert seen.norms == pytest.approx([0.001] * 4, rel=1e-2)
    assert min(measured.grad_norm for _, measured in seen.updates) > 0.002  # it was cut down to that


def test_the_kl_in_the_loss_is_to_the_model_before_training(model: Path, tmp_path: Path, seen: Seen) -> None:
    """Where every ratio is 1, the loss is -w A + w kl_beta k3, and k3 follows from the draws and the reference."""
    run(model, tmp_path, "training.kl_beta=0.5", steps=2)
    (first, unmoved), (second, moved) = seen.updates
    assert max(abs(gap) for row in first for gap in free_gaps(row)) < 1e-5 and abs(unmoved.kl) < 1e-6
    kl = sum(row.weight * sum(math.exp(gap) - gap - 1 for gap in free_gaps(row)) for row in second)
    plain = sum(row.weight * row.advantage * row.forced.count(False) for row in second)
    assert moved.kl == pytest.approx(kl, rel=1e-3) and kl > 1e-3
    assert moved.loss == pytest.approx(0.5 * kl - plain, abs=1e-5)


def test_the_kl_in_the_reward_is_in_the_advantages(model: Path, tmp_path: Path, seen: Seen) -> None:
    run(
        model, tmp_path, "training.kl_beta=0.5", "training.kl_in=reward", "training.kl_estimate=k1",
        "training.advantage=dr_grpo", steps=2,
    )  # fmt: skip
    with Store(RunFolder(tmp_path).store) as store:
        rewards = [one.reward for one in store.trajectories(1, "train", 2)]
    rows, measured = seen.updates[1]
    kept = {row.trajectory: (rewards[row.trajectory] or 0.0) + 0.5 * sum(free_gaps(row)) for row in rows}
    assert len(kept) == len(rows) == len(rewards) == 16
    expected = [kept[i] - sum(kept[k] for k in range(i - i % 8, i - i % 8 + 8)) / 8 for i in range(16)]
    assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-5)
    assert max(abs(0.5 * sum(free_gaps(row))) for row in rows) > 1e-2
    plain = sum(row.weight * row.advantage * row.forced.count(False) for row in rows)
    assert measured.loss == pytest.approx(-plain, abs=1e-5) and measured.kl > 1e-3


def test_the_kl_of_supervised_training_is_to_the_model_before_it(model: Path, tmp_path: Path, seen: Seen) -> None:
    wanted = teacher(tmp_path / "teacher")
    settings = ("training.learning_rate=0.05", "sft.epochs=2", "training.warmup_steps=1")

    def learn(folder: str, *more: str) -> None:
        sft(
            supervised(model, *settings, *more), tmp_path / folder, wanted, progress=Progress(io.StringIO()),
            tools=[pick, note], eval_tasks=HELD_OUT, evaluate_ends=False,
        )  # fmt: skip

    learn("held", "training.kl_beta=0.5")
    assert seen.of("lr") == [0.025, 0.05]
    (_, unmoved), (rows, moved) = seen.updates
    assert all(row.reference is not None for row in rows)
    assert abs(unmoved.kl) < 1e-6 and moved.kl > 1e-3
    learn("free")
    _, free = seen.updates[3]
    assert moved.loss - free.loss == pytest.approx(0.5 * moved.kl, abs=1e-4) and free.kl == 0.0


def test_packs_that_memory_halved_stay_so_over_a_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, update, short = step.run, Updater.update, [True]

    def running(*arguments: Any, **settings: Any) -> None:
        if short:
            short.clear()
            raise MemoryError
        real(*arguments, **settings)

    def stopping(updater: Updater, rows: Sequence[Row], **settings: Any) -> UpdateMetrics:
        if rows[0].weights_version == 2:
            raise KeyboardInterrupt
        return update(updater, rows, **settings)

    monkeypatch.setattr("midflight.training.session.write_plots", lambda folder: [])
    monkeypatch.setattr(step, "run", running)
    run(model, tmp_path / "one", steps=3)
    undisturbed = read_metrics(RunFolder(tmp_path / "one").metrics)
    assert len({one["pack_tokens"] for one in undisturbed}) == 1 and undisturbed[0]["pack_tokens"] < 2048
    short.append(True)
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "update", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "two", steps=3)
    run(model, tmp_path / "two", steps=3, resume=True)
    resumed = read_metrics(RunFolder(tmp_path / "two").metrics)
    kept = (*SAME, "pack_tokens", "unique_tokens")
    assert [[one[name] for name in kept] for one in resumed] == [[one[name] for name in kept] for one in undisturbed]
