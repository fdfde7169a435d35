"""The whole training loop on a model of a few random weights, small enough to run in seconds."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field
from safetensors.torch import load_file

from midflight.api import recipe_for
from midflight.errors import CannotWrite, TrainingStopped, UserError
from midflight.progress import Progress
from midflight.recipe import Recipe, RecipeError
from midflight.store import RunFolder, Store, read_metrics
from midflight.store.seals import checkpoint_folders
from midflight.tasks.base import Task
from midflight.tools import tool
from midflight.training.drift import DriftError
from midflight.training.step import OutOfMemory
from midflight.training.trainer import Trainer

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_plots")]

SAME = (
    "reward",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "drift",
    "trained_tokens",
    "generated_tokens",
    "success",
    "turns",
)


@tool(blocking=False)
def pick(letter: Annotated[str, Field(pattern="^[abc]{1,1}$")]) -> str:
    """pick a letter"""
    return letter


TASKS = [Task(str(number), f"Pick a letter, number {number}.", "a") for number in range(4)]


def recipe(model: Path, *overrides: str, steps: int = 4) -> Recipe:
    settings = ["training.queries_per_step=4", "training.save_every=1", "training.learning_rate=0.02", *overrides]
    return recipe_for([pick], name="tiny", model=str(model), steps=steps, max_turns=1, overrides=settings)


def run(recipe: Recipe, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    from midflight.training.trainer import train

    stream = io.StringIO()
    train(recipe, folder, progress=Progress(stream), tools=[pick], tasks=TASKS, **settings)
    return list(read_metrics(RunFolder(folder).metrics))


def numbers(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [[record[name] for name in SAME] for record in records]


def phases(folder: Path) -> list[tuple[str, int | None, int]]:
    with Store(RunFolder(folder).store) as store:
        found = store.trajectories(store.runs()[-1].id)
    keys = [(one.phase, one.step) for one in found]
    return [(phase, step, keys.count((phase, step))) for phase, step in dict.fromkeys(keys)]


@pytest.mark.parametrize("lora", ["model.lora.rank=4", "model.lora=null"])
def test_reward_rises_and_a_run_cut_off_in_its_update_resumes_with_the_same_numbers(
    model: Path, tmp_path: Path, lora: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midflight.training import step

    settings = recipe(model, lora, "training.learning_rate=0.01", steps=8)
    undisturbed = run(settings, tmp_path / "one")
    rewards = [record["reward"] for record in undisturbed]
    assert rewards[0] < 0.4 and min(rewards[-3:]) > 0.8, rewards
    assert max(record["drift"] for record in undisturbed) <= 2e-6

    real, calls = step.Updater.update, []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(step.Updater, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "two")
    phase, cut, members = phases(tmp_path / "two")[-1]  # a step without signal makes no update
    assert (phase, members) == ("train", 32) and cut is not None and cut >= 4
    assert numbers(list(read_metrics(RunFolder(tmp_path / "two").metrics))) == numbers(undisturbed[: cut - 1])
    assert numbers(run(settings, tmp_path / "two", resume=True)) == numbers(undisturbed)
    assert phases(tmp_path / "two") == phases(tmp_path / "one")


def test_drift_stops_the_run_and_is_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.training.session.make_batch_invariant", lambda model: False)  # or it would be 0
    with pytest.raises(TrainingStopped, match="sampler and trainer disagree: log-prob .* training.max_drift = 1e-30"):
        run(recipe(model, "training.max_drift=1e-30"), tmp_path / "run")


@pytest.mark.parametrize(("fault", "moves"), [(DriftError, False), (OutOfMemory, True)])
def test_the_steps_before_an_update_that_stops_the_run_are_kept_unless_it_moved_the_weights(
    model: Path, tmp_path: Path, fault: type[RuntimeError], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midflight.training.step import Updater

    real, calls = Updater.update, []

    def stopping(self: Updater, *arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            return real(self, *arguments, **settings)
        if moves:
            real(self, *arguments, **settings)
        raise fault("so it ends")

    monkeypatch.setattr(Updater, "update", stopping)
    with pytest.raises(TrainingStopped, match="so it ends"):
        run(recipe(model, "training.save_every=50", steps=8), tmp_path)
    done = [record["step"] for record in read_metrics(RunFolder(tmp_path).metrics)]
    kept = [folder.name for folder in RunFolder(tmp_path).checkpoints.glob("step-*")]
    assert len(done) >= 2 and kept == ([] if moves else [f"step-{done[-1]:05d}"])


def test_updates_skipped_in_a_row_are_counted_over_a_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    real, asked = torch.nn.utils.clip_grad_norm_, []

    def overflowing(*arguments: Any) -> torch.Tensor:
        asked.append(1)
        return real(*arguments) * float("inf")

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflowing)
    for resume, updates, rows in ((False, 3, "their rows"), (True, 1, "the rows of the last 1, since the resume,")):
        asked.clear()
        with pytest.raises(TrainingStopped, match=rf"not finite in 3 updates in a row; {rows} are in "):
            run(recipe(model, steps=8), tmp_path, resume=resume)
        assert len(asked) == updates
        assert [record["skipped_updates"] for record in read_metrics(RunFolder(tmp_path).metrics)] == [1, 1]


def test_flex_attention_without_cuda_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training.attention = flex: needs CUDA, the model is on cpu; set it to sdpa"):
        run(recipe(model, "training.attention=flex", "model.device=cpu"), tmp_path / "run")


def test_a_log_prob_that_is_no_number_stops_the_run_before_a_weight_moves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midflight.training import step

    steps: list[int] = []
    real = step.run

    def broken(*arguments: Any, **settings: Any) -> None:
        *rest, on_scores = arguments

        def spoilt(pack: Any, scores: Any) -> Any:
            return on_scores(pack, replace(scores, logprobs=scores.logprobs * float("nan")))

        real(*rest, spoilt, **settings)

    monkeypatch.setattr(step, "run", broken)
    monkeypatch.setattr("torch.optim.AdamW.step", lambda *_, **__: steps.append(1))
    with pytest.raises(TrainingStopped, match="sampler and trainer disagree: log-prob .* nan in the trainer"):
        run(recipe(model), tmp_path / "run")
    assert steps == []


def test_groups_without_signal_leave_the_weights_and_their_version_alone(model: Path, tmp_path: Path) -> None:
    from midflight.training.trainer import train

    never = [Task("0", "Pick a letter.", "z"), Task("1", "Pick a letter.", "y")]
    run_dir = tmp_path / "run"
    train(recipe(model, steps=2), run_dir, progress=Progress(io.StringIO()), tools=[pick], tasks=never)
    records = read_metrics(RunFolder(run_dir).metrics)
    seen = [(one["reward"], one["groups_with_signal"], one["trained_tokens"], one["loss"]) for one in records]
    assert seen == [(0.0, 0, 0, 0.0)] * 2
    adapter = load_file(run_dir / "checkpoints" / "step-00002" / "adapter_model.safetensors")
    assert all(not weight.any() for name, weight in adapter.items() if "lora_B" in name)
    with Store(RunFolder(run_dir).store) as store:
        found = store.trajectories(store.runs()[-1].id)
    assert {turn.generation.weights_version for one in found for turn in one.trajectory.turns} == {0}


def test_nothing_is_left_of_a_run_that_cannot_start(model: Path, tmp_path: Path) -> None:
    tight = recipe(model, "model.context_length=100", "agent.memory_tokens=32")
    with pytest.raises(RecipeError, match=r"model.context_length = 100: the planner's prompt takes \d+ tokens"):
        run(tight, tmp_path / "run")
    with pytest.raises(UserError, match="model.device = mps: torch finds none on this machine"):
        run(recipe(model, "model.device=mps"), tmp_path / "run")
    with pytest.raises(UserError, match="--resume: .* does not exist"):
        run(recipe(model), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_held_out_questions_before_and_after_and_what_is_not_whole_is_said(model: Path, tmp_path: Path) -> None:
    asked = [Task("x", "Pick a letter.", "a")]
    run(recipe(model, steps=1), tmp_path / "run", eval_tasks=asked)
    folder = RunFolder(tmp_path / "run")
    assert phases(folder.path) == [("before", None, 1), ("train", 1, 32), ("after", None, 1)]
    assert "held-out questions before and after training" in folder.report_text.read_text()
    (folder.checkpoints / "step-00009").mkdir()
    folder.report_json.unlink()  # as if it had been stopped before its report
    from midflight.training.trainer import train

    stream = io.StringIO()
    train(
        recipe(model, steps=1), folder.path, resume=True, progress=Progress(stream), tools=[pick], tasks=TASKS,
        eval_tasks=asked,
    )  # fmt: skip
    notes = stream.getvalue().splitlines()
    not_whole = (
        f"{folder.checkpoints / 'step-00009'} is not whole, not used: it has no state.json, which is written last"
    )
    assert not_whole in notes
    assert f"resuming {folder.path} after step 1" in notes
    assert phases(folder.path) == [("before", None, 1), ("train", 1, 32), ("after", None, 1)]


def test_what_a_checkpoint_has_done_is_on_the_disk_before_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midflight.store import MetricsWriter
    from midflight.training import session

    done: list[str] = []
    real = session.save_checkpoint

    def save(*arguments: Any, **named: Any) -> Path:
        done.append("checkpoint")
        return real(*arguments, **named)

    monkeypatch.setattr(Store, "to_disk", lambda store: done.append(f"store with {len(store.steps(1))}"))
    monkeypatch.setattr(
        MetricsWriter, "to_disk", lambda metrics: done.append(f"{len(read_metrics(metrics.path))} lines")
    )
    monkeypatch.setattr(session, "save_checkpoint", save)
    run(recipe(model, "training.save_every=2", steps=3), tmp_path / "run")
    assert done == ["store with 2", "2 lines", "checkpoint", "store with 3", "3 lines", "checkpoint"]


def test_a_step_that_stops_in_its_rollouts_has_the_steps_before_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(model, "training.save_every=4", "training.keep_last=9")
    undisturbed = run(settings, tmp_path / "whole")
    real, stops, error = Trainer._rollouts, {3}, TrainingStopped("the budget is spent")

    async def stopping(self: Trainer, store: Store, run_id: int, step: int, bar: Any) -> Any:
        if step in stops:
            raise error
        return await real(self, store, run_id, step, bar)

    monkeypatch.setattr(Trainer, "_rollouts", stopping)

    def saved() -> list[str]:
        return [one.name for one in checkpoint_folders(RunFolder(tmp_path / "run").checkpoints)]

    for resume in (False, True):
        with pytest.raises(TrainingStopped, match="^the budget is spent$"):
            run(settings, tmp_path / "run", resume=resume)
        assert saved() == ["step-00002"]
    stops, error = {4}, CannotWrite(tmp_path, OSError("full"))
    with pytest.raises(CannotWrite):
        run(settings, tmp_path / "run", resume=True)
    assert saved() == ["step-00002"]  # it may come after the weights moved
    stops = {1}
    error = TrainingStopped("the budget is spent")
    with pytest.raises(TrainingStopped):
        run(settings, tmp_path / "first")
    assert list(RunFolder(tmp_path / "first").checkpoints.iterdir()) == []
    stops = set()
    assert numbers(run(settings, tmp_path / "run", resume=True)) == numbers(undisturbed)
    assert saved() == ["step-00002", "step-00004"]
