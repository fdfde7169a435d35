"""The report a run ends with: before against after, as plain text and as JSON.

Invariant: it reads the same in any terminal or file, and every accuracy stands beside its n and interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent

from midflight.agent.types import StopReason, Trajectory
from midflight.errors import reading
from midflight.evaluation.statistics import Estimate, EvaluationResult, Scored, counted_reward
from midflight.evaluation.text import interval, percent, points, table
from midflight.rendering import plain, render_claim, render_turn
from midflight.store.folder import RunFolder
from midflight.tasks.base import Task

AGAIN = "remove it: the report is then made again by --resume"
RIGHT = 1.0
"""A reward of at least this is a right answer."""


@dataclass(frozen=True)
class Example:
    """One question before and after training, and why it is the one shown (`before` and `after` None: none was)."""

    note: str
    before: Scored | None = None
    after: Scored | None = None


@dataclass(frozen=True)
class Closing:
    """What the last lines of a report are made of; `report.json` keeps it, since a run can be moved."""

    folder: str
    """Where the run was when its report was written."""
    steps: int
    seconds: float
    earlier_seconds: float
    """Of `seconds`, those of the steps that sessions before the last made."""
    plots: list[str]
    question: str
    own_tools: list[str]

    def lines(self, folder: RunFolder) -> list[str]:
        """The lines, with `folder` as the run's place."""
        earlier = f", {self.earlier_seconds:.0f} s of it in steps of earlier sessions" if self.earlier_seconds else ""
        ask = f'midflight solve "{self.question}" --model {folder.path}'
        if self.own_tools:
            ask = f"midflight.solve({self.question!r}, {str(folder.path)!r}, tools=[{', '.join(self.own_tools)}])"
        return [
            f"took {self.seconds:.0f} s{earlier}",
            f"run folder: {folder.path}",
            f"plots: {folder.plots} ({', '.join(self.plots)})",
            f"try next: {ask}",
        ]


def pick_example(before: Sequence[Scored], after: Sequence[Scored]) -> Example:
    """The first question that was wrong before and is right after, of level 3 where there is one, else the hardest.

    With several trials a question is taken by its first in each list.
    """
    before_by_id: dict[str, Scored] = {}
    for item in before:
        before_by_id.setdefault(item.task.id, item)
    gained: dict[str, tuple[Scored, Scored]] = {}
    for item in after:
        earlier = before_by_id.pop(item.task.id, None)
        if earlier is not None and counted_reward(earlier) < RIGHT <= counted_reward(item):
            gained[item.task.id] = (earlier, item)
    if not gained:
        return Example("No question was wrong before training and right after it, so none is shown.")
    pairs = list(gained.values())
    chosen = next((pair for pair in pairs if pair[1].task.level == 3), None)
    if chosen is None:
        chosen = max(pairs, key=lambda pair: pair[1].task.level)
        preference = f"none of them is of level 3; this one is of the highest level, {chosen[1].task.level}"
    else:
        preference = "the first of level 3"
    note = f"Picked because it was wrong before and right after ({len(pairs)} such questions; {preference})."
    return Example(note, *chosen)


def render_example(example: Example) -> str:
    """The note, then both trajectories."""
    if example.before is None or example.after is None:
        return example.note
    parts = [example.note]
    for name, item in (("Before training", example.before), ("After training", example.after)):
        parts += ["", name, render_trajectory(item.trajectory, item.task, counted_reward(item))]
    return "\n".join(parts)


def render_trajectory(trajectory: Trajectory, task: Task | None = None, reward: float | None = None) -> str:
    """One trajectory, a few lines a turn. Without `task` (a free question) nothing is expected and nothing judged."""
    kind = "" if task is None else f"  ({task.kind}, level {task.level})"
    lines = [f"  Question  {plain(trajectory.query.text)}{kind}"]
    if trajectory.analysis:
        lines.append(f"  Analysis  {plain(trajectory.analysis)}")
    for turn in trajectory.turns:
        lines.append(indent(render_turn(turn), "  "))
    answer = "(none)" if trajectory.answer is None else plain(trajectory.answer.text)
    lines.append(f"  Answer    {answer}   [stopped: {trajectory.stop_reason.value}]")
    if trajectory.answer is not None:
        for claim in trajectory.answer.claims:
            lines.append(f"    claim   {render_claim(claim)}")
    if trajectory.error:
        lines.append(f"  Error     {plain(trajectory.error)}")
    if task is not None:
        lines.append(f"  Expected  {plain(task.answer)}")
    if reward is not None:
        lines.append(f"  Verdict   {_judged(trajectory, reward)}")
    return "\n".join(lines)


def _judged(trajectory: Trajectory, reward: float) -> str:
    if trajectory.stop_reason is StopReason.INFRASTRUCTURE:
        return "not answered: infrastructure failure, counted wrong"
    if trajectory.stop_reason.lost:
        return f"not answered: {trajectory.stop_reason}, counted wrong"
    word = "right" if reward >= RIGHT else "wrong" if reward <= 0.0 else "partly right"
    return f"{word} (reward {reward:g})"


def comparison_table(results: Mapping[str, EvaluationResult]) -> str:
    """One row a result: accuracy and level 3 or more with intervals, turns, errors, infrastructure failures.

    Where nothing was scored the accuracies are dashes.
    """
    headers = ["", "n", "accuracy %", "level 3+ %", "turns", "tool errors %", "infrastructure"]
    rows = [
        [
            name,
            str(result.n),
            interval(None if result.nothing_scored else result.accuracy),
            interval(None if result.nothing_scored else result.three_or_more),
            f"{result.mean_turns:.2f}",
            percent(result.tool_error_rate),
            str(result.infrastructure),
        ]
        for name, result in results.items()
    ]
    return table(headers, rows)


def render_report(
    before: EvaluationResult,
    after: EvaluationResult,
    *,
    title: str = "Before and after training",
    example: Example | None = None,
    closing: Sequence[str] = (),
) -> str:
    """The whole report; `closing` are its last lines (run folder, plots, the next command), printed as given."""
    sections = [
        f"{title}\n{'=' * len(title)}",
        "Accuracy in per cent with 95 % bootstrap intervals over questions; every question counts. Tool errors\n"
        "are shares of all calls of tools.\n\n" + comparison_table({"before": before, "after": after}),
        "By kind of question\n\n" + _kinds(before, after),
        "Tools chosen, share of all actions in per cent\n\n" + _shares(before.tool_shares, after.tool_shares),
        "Turns that ended in an error, per cent of all turns\n\n" + _errors(before, after),
        "Why trajectories stopped, number of trajectories\n\n" + _stops(before, after),
    ]
    for name, result in (("before", before), ("after", after)):
        if result.infrastructure:
            note = (
                f"Note: {result.infrastructure} trajectories {name} training were lost to infrastructure failures; "
                "counted wrong above."
            )
            reasons = (f"  {count}  {reason}" for reason, count in result.infrastructure_reasons.items())
            sections.append("\n".join([note, *reasons]))
    if example is not None:
        sections.append("One question, before and after\n\n" + render_example(example))
    if closing:
        sections.append("\n".join(closing))
    return "\n\n".join(sections) + "\n"


def write_report(
    folder: RunFolder, before: EvaluationResult, after: EvaluationResult, text: str, closing: Closing | None = None
) -> None:
    """Write `report.txt` (the rendered text) and `report.json` (results and closing) into the run folder."""
    folder.report_text.write_text(text, encoding="utf-8", errors="backslashreplace")
    record = {"before": before.to_json(), "after": after.to_json()}
    if closing is not None:
        record["closing"] = asdict(closing)
    folder.report_json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_closing(folder: RunFolder) -> Closing | None:
    """The closing in `report.json`; None where a run has no report, or one of an earlier version."""
    if not folder.report_json.is_file():
        return None
    with reading(folder.report_json, AGAIN):
        closing = json.loads(folder.report_json.read_text(encoding="utf-8")).get("closing")
        return None if closing is None else Closing(**closing)


def read_report(folder: RunFolder) -> str:
    """The text of `report.txt`, its last lines with the place where the run is now."""
    with reading(folder.report_text, AGAIN):
        text = folder.report_text.read_text(encoding="utf-8")
    closing = read_closing(folder)
    if closing is None:
        return text
    then, now = ("\n".join(closing.lines(place)) + "\n" for place in (RunFolder(Path(closing.folder)), folder))
    return text.removesuffix(then) + now if text.endswith(then) else text


def _kinds(before: EvaluationResult, after: EvaluationResult) -> str:
    levels = {**after.level_of_kind, **before.level_of_kind}
    rows = []
    for kind, level in sorted(levels.items(), key=lambda pair: (pair[1], pair[0])):
        earlier, later = before.by_kind.get(kind), after.by_kind.get(kind)
        rows.append([kind, str(level), _counts(earlier, later), interval(earlier), interval(later)])
    everything = ["all", "", _counts(before.accuracy, after.accuracy), interval(before.accuracy)]
    rows.append([*everything, interval(after.accuracy)])
    return table(["kind", "level", "n", "before %", "after %"], rows)


def _counts(before: Estimate | None, after: Estimate | None) -> str:
    counts = [str(estimate.n) if estimate else "0" for estimate in (before, after)]
    return counts[0] if counts[0] == counts[1] else "/".join(counts)


def _shares(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    tools = sorted({*before, *after}, key=lambda tool: (-after.get(tool, 0.0), tool))
    rows = [_shift(plain(tool, 40), before.get(tool, 0.0), after.get(tool, 0.0)) for tool in tools]
    return table(["tool", "before", "after", "points"], rows)


def _errors(before: EvaluationResult, after: EvaluationResult) -> str:
    kinds = [kind for kind in before.errors if before.errors[kind] or after.errors.get(kind)]
    kinds += [kind for kind in after.errors if kind not in before.errors]
    rows = [_shift(kind, before.errors.get(kind, 0.0), after.errors.get(kind, 0.0)) for kind in kinds]
    rows.append(_shift("any error", sum(before.errors.values()), sum(after.errors.values())))
    return table(["error", "before", "after", "points"], rows)


def _shift(name: str, before: float, after: float) -> list[str]:
    return [name, percent(before), percent(after), points(before, after)]


def _stops(before: EvaluationResult, after: EvaluationResult) -> str:
    reasons = [r.value for r in StopReason if r.value in before.stop_reasons or r.value in after.stop_reasons]
    rows = [[r, str(before.stop_reasons.get(r, 0)), str(after.stop_reasons.get(r, 0))] for r in reasons]
    return table(["reason", "before", "after"], rows)
