"""A step or an evaluation of which the infrastructure left nothing stops the run, and is made again."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from midflight.agent.types import StopReason, Trajectory
from midflight.engines.base import EngineGaveUp, GenerateRequest, Generation
from midflight.engines.local import LocalEngine
from midflight.errors import TrainingStopped
from midflight.progress import Progress
from midflight.store import RunFolder, Store, read_metrics
from midflight.tasks.base import Task
from midflight.training.rollouts import check_lost
from tests.evaluation.build import trajectory
from tests.training.test_trainer import TASKS, numbers, phases, pick, recipe

GONE = replace(trajectory(stop=StopReason.INFRASTRUCTURE, answer=None), error="planner failed: s: gone")
CUT = trajectory(stop=StopReason.CANCELLED, answer=None)
DONE = trajectory()
HELD_OUT = [Task(name, f"Pick a letter, {name}.", "a") for name in ("x", "y")]
LOST = "were lost to infrastructure failures"
KEPT = "go on with: your program, train_on(..., resume=True)"


@dataclass
class Outage:
    """The planner's engine in a run of two steps: it asks 2 times before, 32 times a step, 2 times after."""

    down: Callable[[int], bool] = lambda call: False
    """Whether it fails at a call, counted from 1."""
    calls: int = 0
    overrides: tuple[str, ...] = ()
    said: io.StringIO = field(default_factory=io.StringIO)

    def failing(self) -> str | None:
        self.calls += 1
        return f"s: out of memory (2 attempts in {self.calls / 7:.1f} s)" if self.down(self.calls) else None

    def run(self, model: Path, folder: Path, *, resume: bool = False) -> list[dict[str, Any]]:
        """Train; the metrics."""
        from midflight.training.trainer import train

        with pytest.MonkeyPatch.context() as patch:
            real = LocalEngine.generate

            async def generate(engine: LocalEngine, request: GenerateRequest) -> Generation:
                problem = self.failing()
                if problem is not None:
                    raise EngineGaveUp(problem)
                return await real(engine, request)

            patch.setattr(LocalEngine, "generate", generate)
            train(
                recipe(model, *self.overrides, steps=2), folder, resume=resume, progress=Progress(self.said),
                tools=[pick], tasks=TASKS, eval_tasks=HELD_OUT,
            )  # fmt: skip
        return list(read_metrics(RunFolder(folder).metrics))


@pytest.mark.model
@pytest.mark.usefixtures("no_plots")
def test_what_lost_everything_stops_the_run_and_is_made_again(model: Path, tmp_path: Path) -> None:
    undisturbed = Outage().run(model, tmp_path / "one")
    folder = RunFolder(tmp_path / "two")

    def stopped(after: int, *, resume: bool = True) -> str:
        with pytest.raises(TrainingStopped) as caught:
            Outage(lambda call: call > after).run(model, folder.path, resume=resume)
        return str(caught.value)

    assert stopped(0, resume=False) == (
        f"evaluation before training: 2 of 2 trajectories {LOST}: planner failed: s: out of memory (2 attempts in "
        f"0.1 s); {KEPT}"
    )
    assert phases(folder.path) == [("before", None, 2)] and not folder.eval_before.exists()
    reason = "planner failed: s: out of memory (2 attempts in 5.0 s)"
    assert stopped(34) == f"step 2: 32 of 32 trajectories {LOST}: {reason}; {KEPT}"
    assert numbers(read_metrics(folder.metrics)) == numbers(undisturbed[:1])
    assert phases(folder.path) == [("before", None, 2), ("train", 1, 32), ("interrupted", 2, 32)]
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00001"]
    assert stopped(32).startswith(f"evaluation after training: 2 of 2 trajectories {LOST}: planner failed")
    assert not folder.eval_after.exists() and not folder.report_text.exists()
    assert numbers(Outage().run(model, folder.path, resume=True)) == numbers(undisturbed)
    assert phases(folder.path) == phases(tmp_path / "one")
    with Store(folder.store) as store:
        assert not any(one.trajectory.stop_reason.lost for one in store.trajectories(1))
    assert folder.report_text.is_file()


@pytest.mark.model
@pytest.mark.usefixtures("no_plots")
def test_what_lost_a_part_goes_on_and_says_why(model: Path, tmp_path: Path) -> None:
    outage = Outage(lambda call: call == 1 or 35 <= call <= 42)
    records = outage.run(model, tmp_path)
    assert [record["infrastructure"] for record in records] == [0, 8]
    reason = "planner failed: s: out of memory (2 attempts in 5.0 s)"
    assert [record["infrastructure_reasons"] for record in records] == [{}, {reason: 8}]
    said = outage.said.getvalue().splitlines()
    (place,) = (place for place, line in enumerate(said) if line.startswith("step 2/2  reward "))
    assert said[place + 1] == f"8 of 32 trajectories {LOST}: {reason}"
    first = "planner failed: s: out of memory (2 attempts in 0.1 s)"
    assert f"evaluation before training: 1 of 2 trajectories {LOST}: {first}" in said
    with Store(RunFolder(tmp_path).store) as store:
        first_two, later = store.trajectories(1, "before"), store.trajectories(1, "after")
    assert [one.trajectory.stop_reason.lost for one in first_two] == [one.reward is None for one in first_two]
    assert sum(one.reward is None for one in first_two) == 1 and all(one.reward is not None for one in later)
    report = RunFolder(tmp_path).report_text.read_text()
    assert f"\nNote: 1 trajectories before training {LOST}; counted wrong above.\n  1  {first}\n\n" in report


@pytest.mark.model
@pytest.mark.usefixtures("no_plots")
def test_after_a_draw_that_was_lost_whole_no_other_is_asked_for(model: Path, tmp_path: Path) -> None:
    outage = Outage(lambda call: call > 2, overrides=("training.refill_factor=4",))
    with pytest.raises(TrainingStopped, match=r"^step 1: 32 of 32 trajectories were lost"):
        outage.run(model, tmp_path)
    assert outage.calls == 2 + 32


@pytest.mark.parametrize("made", [[], [CUT, CUT], [DONE], [GONE, DONE, CUT]])
def test_what_stops_nothing(made: list[Trajectory], tmp_path: Path) -> None:
    check_lost("step 3", made, RunFolder(tmp_path))


def test_where_only_the_time_limit_cut_others_off_all_were_lost(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped) as stopped:
        check_lost("step 3", [CUT, GONE, replace(GONE, error="verifier failed"), GONE], RunFolder(tmp_path))
    assert str(stopped.value) == (
        "step 3: 3 of 4 trajectories were lost to infrastructure failures, 2 of them so: planner failed: s: gone; "
        f"go on with: midflight train {tmp_path} --resume"
    )
