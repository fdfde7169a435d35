"""Run folders as the trainer leaves them, from as little as each test says."""

import json
from pathlib import Path

import yaml
from common import SPENT

from midflight.agent.types import Action, ErrorKind, Generation, ToolCall, ToolResult, Turn, Verdict
from midflight.engines.base import FinishReason
from midflight.evaluation import Scored, summarise, write_report
from midflight.recipe import load_recipe, resolved
from midflight.store import MetricsWriter, NewTrajectory, RunFolder, Store
from midflight.tasks.base import Task
from tests.evaluation.build import task as question
from tests.evaluation.build import trajectory

__all__ = ["answered", "finished_run", "question", "trajectory", "turn"]


def turn(index, tool, result="", error=None, stop=False, reason=""):
    action = None if tool is None else Action("", tool, "x")
    called = tool is not None and error in (None, ErrorKind.TOOL_ERROR, ErrorKind.TOOL_TIMEOUT)
    return Turn(
        index,
        Generation("text", FinishReason.STOP),
        action,
        ToolCall(tool, {}) if called else None,
        ToolResult(result, error),
        Verdict(stop, reason),
    )


def answered(task: Task, reward: float) -> Scored:
    text = task.answer if reward else "no"
    return Scored(task, trajectory(turn(1, "capital", text), turn(2, "finish"), answer=text), reward)


def finished_run(
    folder: Path,
    before: list[Scored],
    after: list[Scored],
    *,
    recipe: str = "quickstart",
    overrides: tuple[str, ...] = (),
    drifts: tuple[float, ...] = (1e-6, 3e-6),
    spent: tuple[float, float] | None = (120.0, 2.5),
) -> Path:
    paths = RunFolder(folder).create()
    settings = load_recipe(recipe, overrides)
    paths.recipe.write_text(yaml.safe_dump(resolved(settings)))
    with MetricsWriter(paths.metrics) as metrics:
        for step, drift in enumerate(drifts, 1):
            metrics.write({"step": step, "drift": drift})
    with Store(paths.store) as store:
        run_id = store.start_run(settings.name, resolved(settings), settings.seed)
        for phase, scored in (("before", before), ("after", after)):
            store.add_trajectories(
                run_id,
                [
                    NewTrajectory(
                        phase=phase,
                        step=None,
                        group=item.task.id,
                        member=0,
                        task=item.task,
                        trajectory=item.trajectory,
                        reward=item.reward,
                    )
                    for item in scored
                ],
            )
    results = [summarise(scored, resamples=100) for scored in (before, after)]
    results[0].save(paths.eval_before)
    results[1].save(paths.eval_after)
    write_report(paths, results[0], results[1], "report\n")
    if spent is not None:
        (folder / SPENT).write_text(json.dumps({"seconds": spent[0], "peak_gb": spent[1]}))
    return folder
