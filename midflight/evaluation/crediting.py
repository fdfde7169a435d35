"""`midflight credit`: which turn of a stored trajectory decided its reward.

torch is imported only where continuations are made.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from midflight import looping
from midflight.agent import NotReplayable
from midflight.agent.types import StopReason, Trajectory, Turn
from midflight.errors import InfrastructureError, UserError
from midflight.evaluation.credit import Change, TrajectoryCredit, counted, group_credit, monte_carlo_credit
from midflight.evaluation.plots import write_credit_plot
from midflight.evaluation.statistics import Estimate, budget_spent, infrastructure_reasons, nothing_scored
from midflight.evaluation.text import table
from midflight.progress import Progress
from midflight.recipe.own import check_kept_tools, own_tools
from midflight.recipe.resuming import read_recipe
from midflight.recipe.rules import check
from midflight.rendering import plain, unscored
from midflight.rewards import checker_fault, score
from midflight.store import PhaseLine, RunFolder, Store, TrajectoryRecord
from midflight.tools.base import Tool

CONTINUATIONS = 16
"""From each state, unless the caller says otherwise."""
LISTED = 30
"""Most trajectories in a list."""


@dataclass(frozen=True)
class Continuing:
    """How a trajectory's states are continued.

    Args:
        continuations: from each state.
        model: who goes on: a run folder, a checkpoint, a model folder or a Hub name; None: the run's newest checkpoint.
        seed: None is the run's.
        tools: the caller's own tools that the run's recipe names.
    """

    continuations: int = CONTINUATIONS
    model: str | None = None
    seed: int | None = None
    tools: Sequence[Tool] = ()


@dataclass(frozen=True)
class Credited:
    """A trajectory with the value of its turns, and how the continuations were made (None: by the group alone).

    `reasons` are why infrastructure failures ended continuations.
    """

    record: TrajectoryRecord
    credit: TrajectoryCredit
    continued: Continuing | None
    temperature: float | None
    reasons: Mapping[str, int] = field(default_factory=dict)

    def actions(self) -> list[str]:
        """What was chosen in each turn, on one line."""
        return [_action(turn) for turn in self.record.trajectory.turns]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        record, continued = self.record, self.continued
        return {
            "phase": record.phase,
            "step": record.step,
            "group": record.group,
            "question": record.trajectory.query.text,
            "actions": self.actions(),
            "model": None if continued is None else continued.model,
            "temperature": self.temperature,
            "continuations": None if continued is None else continued.continuations,
            "seed": None if continued is None else continued.seed,
            **self.credit.to_json(),
        }


def list_trajectories(run: Path, phase: str | None = None, step: int | None = None) -> tuple[str, list[dict[str, Any]]]:
    """The run's last trajectories as a table and as plain data.

    Raises:
        UserError: no such run, phase or step, or nothing in the store yet.
    """
    with _store(run) as store:
        phases = _phases(run, store)
        if phase is not None and phase not in (line.phase for line in phases):
            raise UserError(f"--phase {phase}: run {run} has {', '.join(line.phase for line in phases)}")
        looked = [line for line in phases if phase in (None, line.phase)]
        first = min((line.first_step for line in looked if line.first_step is not None), default=None)
        last = max((line.last_step for line in looked if line.last_step is not None), default=None)
        if step is not None and (first is None or last is None or not first <= step <= last):
            has = "no steps" if first is None else f"steps {first} to {last}"
            raise UserError(f"--step {step}: run {run} has {has}{f' in phase {phase}' if phase else ''}")
        lines = store.last_trajectories(LISTED, phase, step)
    width = max((len(str(line.id)) for line in lines), default=0)
    rows = [
        [
            str(line.id).rjust(width),
            plain(line.phase, 20),
            "-" if line.step is None else str(line.step),
            plain(line.question, 72),
            str(line.turns),
            line.stop_reason,
            "-" if line.reward is None else f"{line.reward:g}",
        ]
        for line in lines
    ]
    text = table(["id", "phase", "step", "question", "turns", "stopped", "reward"], rows, left=4)
    there = ", ".join(f"{plain(line.phase, 20)} {line.first_id} to {line.last_id}" for line in phases)
    footer = f"The last {len(lines)}; ids in the run: {there}. Narrow with --phase and --step."
    return f"{text}\n\n{footer}", [asdict(line) for line in lines]


def credit_trajectory(run: Path, trajectory: int, how: Continuing | None, progress: Progress) -> Credited:
    """The value of each turn of a stored trajectory.

    Args:
        run: the run's folder.
        trajectory: its id in the run's store; see `list_trajectories`.
        how: how its states are continued; None takes the group's estimates alone and needs no model.
        progress: where to show it.

    Raises:
        UserError: no such run or trajectory, one without turns or reward or whose calls cannot be made again, or the
            model cannot be loaded.
        InfrastructureError: no continuation came to its end.
    """
    if how is not None and how.continuations < 1:
        raise UserError(f"continuations = {how.continuations}: a state's value needs at least 1")
    with _store(run) as store:
        record = _find(run, store, trajectory)
        group = store.trajectories(record.run_id, record.phase, record.step, record.group)
    if how is None:
        return Credited(record, group_credit(group)[record.id], None, None)
    return _continued(run, record, group, how, progress)


def _continued(
    run: Path, record: TrajectoryRecord, group: Sequence[TrajectoryRecord], how: Continuing, progress: Progress
) -> Credited:
    fault = checker_fault(record.task.checker, record.task.checker_options)
    if fault is not None:
        raise UserError(f"trajectory {record.id}: its continuations cannot be scored: {fault}; use --group-only")
    recipe = read_recipe(RunFolder(run).recipe)
    check_kept_tools(RunFolder(run), recipe, own_tools(recipe, how.tools))
    check(recipe, own_tools=[tool.name for tool in how.tools], own_tasks=True)

    from midflight.building import build_agent
    from midflight.loading import trained_folder

    model = how.model or str(trained_folder(run, progress.note))
    seed = recipe.seed if how.seed is None else how.seed
    progress.note(f"loading {model}")
    built = build_agent(recipe, model, tools=how.tools, training=True)
    made: list[Trajectory] = []

    def ended(continuation: Trajectory) -> None:
        made.append(continuation)
        bar.advance()

    try:
        with progress.bar("continuing", len(record.trajectory.turns) * how.continuations) as bar:
            credit = looping.run(
                monte_carlo_credit(
                    built.flow,
                    record,
                    continuations=how.continuations,
                    score=score,
                    seed=seed,
                    concurrency=recipe.evaluation.concurrency,
                    group=group,
                    on_done=ended,
                )
            )
    except NotReplayable as error:
        raise UserError(f"trajectory {record.id}: cannot be continued: {error}; use --group-only") from error
    finally:
        built.close()
    stops, reasons = Counter(one.stop_reason for one in made), infrastructure_reasons(made)
    if nothing_scored(stops):
        why = unscored({reason.value: count for reason, count in stops.items()}, budget_spent(made), reasons)
        raise InfrastructureError(f"trajectory {record.id}: nothing was measured: {why}")
    done = Continuing(how.continuations, model, seed, how.tools)
    return Credited(record, credit, done, recipe.agent.planner.temperature, reasons)


def check_plot(path: Path) -> None:
    """Refuse, before any work, a plot that could not be written.

    Raises:
        UserError: not a PNG's name, a folder, or in a folder that is not there or cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise UserError(f"--plot {path}: a PNG is written; end the name in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(
            f"--plot {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}; name a file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--plot {path}: cannot be written; name another file or change its rights")
    importlib.import_module("matplotlib.figure")


def plot(path: Path, credited: Credited) -> None:
    """Write the values of the states as a PNG."""
    write_credit_plot(path, credited.credit, credited.actions())


def render_credit(credited: Credited) -> str:
    """The table of turns, the turning point in a sentence, and what the figures are."""
    record, credit = credited.record, credited.credit
    place = record.phase if record.step is None else f"{record.phase}, step {record.step}"
    made = record.trajectory
    answer = "(none)" if made.answer is None else plain(made.answer.text)
    lines = [
        f"Trajectory {record.id} ({place}, group {plain(record.group, 60)})",
        f"  Question  {plain(made.query.text)}",
        f"  Answer    {answer}   [stopped: {made.stop_reason.value}, reward {credit.reward:g}]",
        "",
        _table(credited),
        "",
        fill(_turning_point(credited), 110),
        "",
        *(fill(line, 110, break_long_words=False, break_on_hyphens=False) for line in _differences(credited)),
    ]
    notes = (fill(note, 110, break_long_words=False, break_on_hyphens=False) for note in _notes(credited))
    return "\n".join([*lines, *notes])


def _differences(credited: Credited) -> list[str]:
    """The calls that gave another result when they were made again, and what that means."""
    made, turns = credited.continued, credited.credit.turns
    pairs = zip(turns, credited.actions(), strict=True)
    found = [
        f"turn {turn.turn} ({plain(action, 40)}): {turn.differing} of {made.continuations * (len(turns) - turn.turn)}"
        for turn, action in pairs
        if made is not None and turn.differing
    ]
    if not found:
        return []
    return [
        "Not the recorded state: calls that were made again to restore what their tools hold gave another result than "
        f"the recorded one, in {'; '.join(found)} continuations from behind the turn. Values after the first of these "
        "turns are of the recorded memory with what the tools held then.",
        "",
    ]


def _notes(credited: Credited) -> list[str]:
    """What the columns are."""
    notes, made = [], credited.continued
    if made is not None:
        notes.append(
            f"Before, after: mean reward of {made.continuations} continuations of the state by "
            f"{plain(str(made.model))} at the training temperature {credited.temperature:g}, seed {made.seed}, with "
            "95 % intervals; after the last turn the trajectory's own reward. Change: its interval is at 95 % for all "
            "turns together."
        )
    if made is not None and credited.credit.lost:
        total = made.continuations * len(credited.credit.turns)
        lost = credited.credit.lost
        why = f", most often: {max(credited.reasons, key=credited.reasons.__getitem__)}" if credited.reasons else "."
        notes.append(f"{lost} of {total} continuations ended in infrastructure failures and are left out{why}")
    notes.append(
        "Group: mean reward of the members of its group that were in the state before the turn, and how many; where it "
        "was alone (1) that is its own reward."
    )
    return notes


def _table(credited: Credited) -> str:
    credit, continued = credited.credit, credited.continued is not None
    headers = ["", "turn", "action", "result"]
    headers += ["before", "after", "change"] if continued else []
    headers += ["group", "group change"]
    rows = []
    turns = zip(credited.record.trajectory.turns, credited.actions(), credit.turns, strict=True)
    for turn, action, value in turns:
        row = ["*" if value is credit.turning_point else "", str(turn.index), plain(action, 32), _result(turn)]
        if continued:
            after = "-" if value.after is None else f"{value.after.mean:.2f}"
            row += [_estimate(value.before), after, _change(value.change)]
        shared = "-" if value.group_before is None else f"{value.group_before.mean:.2f} ({value.group_before.n})"
        rows.append([*row, shared, "-" if value.group_change is None else f"{value.group_change:+.2f}"])
    return table(headers, rows, left=4)


def _turning_point(credited: Credited) -> str:
    credit, point = credited.credit, credited.credit.turning_point
    if point is not None:
        action = plain(credited.actions()[point.turn - 1], 60)
        return f"* Turning point: turn {point.turn} ({action}) changed the expected reward by {_change(point.change)}."
    if credited.continued is not None:
        return (
            "Undecided: no change has an interval without 0. More continuations narrow the intervals "
            f"(--continuations, now {credited.continued.continuations})."
        )
    changes = [(abs(turn.group_change), turn) for turn in credit.turns if turn.group_change is not None]
    if not changes:
        return "The group says nothing: the planner's engine gave no prompt ids to tell states by."
    if all(turn.group_before is not None and turn.group_before.n == 1 for turn in credit.turns):
        return "The group says nothing: the trajectory was alone in every state."
    size, largest = max(changes, key=lambda pair: pair[0])
    if size == 0.0:
        return "By the group alone no turn changed anything: members in the same states have the same mean reward."
    return (
        f"By the group alone the largest change is {largest.group_change:+.2f} in turn {largest.turn}; it has no "
        "interval, so no turning point is named."
    )


def _estimate(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.mean:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _change(change: Change | None) -> str:
    return "-" if change is None else f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"


def _action(turn: Turn) -> str:
    if turn.action is None:
        return f"no action in: {plain(turn.generation.text)}"
    context = f": {plain(turn.action.context)}" if turn.action.context.strip() else ""
    return f"{plain(turn.action.tool, 60)}{context}"


def _result(turn: Turn) -> str:
    error = "" if turn.result.error is None else f"{turn.result.error.value}: "
    return plain(error + turn.result.text, 24)


def _store(run: Path) -> Store:
    if not run.is_dir():
        raise UserError(f"--run {run}: no such folder; runs are made by midflight train")
    file = RunFolder(run).store
    if not file.is_file():
        raise UserError(f"--run {run}: holds no store.sqlite, so no trajectories; name a run folder")
    return Store(file)


def _phases(run: Path, store: Store) -> list[PhaseLine]:
    phases = store.phases()
    if not phases:
        raise UserError(f"--run {run}: no trajectories yet; let it train: midflight train {run} --resume")
    return phases


def _find(run: Path, store: Store, trajectory: int) -> TrajectoryRecord:
    phases = _phases(run, store)
    first, last = min(line.first_id for line in phases), max(line.last_id for line in phases)
    record = store.trajectory(trajectory) if first <= trajectory <= last else None
    if record is None:
        raise UserError(
            f"trajectory {trajectory}: run {run} has {first} to {last}; list them with: midflight credit --run {run}"
        )
    if not counted(record):
        stop, why = record.trajectory.stop_reason, plain(record.trajectory.error)
        ended = "an infrastructure failure ended it" if stop is StopReason.INFRASTRUCTURE else f"stopped: {stop}"
        raise UserError(
            f"trajectory {trajectory}: {ended}{f' ({why})' if why else ''}, so it has no reward; take another"
        )
    if not record.trajectory.turns:
        raise UserError(f"trajectory {trajectory}: it has no turns; take another")
    return record
