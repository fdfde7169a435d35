"""Pictures of a run, from the files of its folder alone.

Invariant: a plot is drawn from what was recorded; what a run did not record has no plot, and a missing value is a gap.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midflight.evaluation.credit import TrajectoryCredit
from midflight.evaluation.statistics import EvaluationResult
from midflight.store.folder import RunFolder
from midflight.store.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Okabe and Ito's palette, told apart by colour-blind readers too."""

Records = Sequence[Mapping[str, Any]]

GAP = math.nan
"""A value a step did not record: matplotlib breaks the line there."""


def write_plots(run_folder: str | Path | RunFolder) -> list[Path]:
    """Draw what `metrics.jsonl`, `eval_before.json` and `eval_after.json` of a run folder allow.

    Returns:
        The PNGs written under `plots/`; none for a folder without records.
    """
    folder = run_folder if isinstance(run_folder, RunFolder) else RunFolder(Path(run_folder))
    records = [record for record in read_metrics(folder.metrics) if "step" in record]
    results = {
        name: EvaluationResult.load(path)
        for name, path in (("before", folder.eval_before), ("after", folder.eval_after))
        if path.exists()
    }
    folder.plots.mkdir(parents=True, exist_ok=True)
    written = []
    if records:
        of_rollouts: dict[str, Callable[[Axes, Records], None]] = {
            "reward": draw_reward,
            "tools": draw_tools,
            "turns": draw_turns,
            "errors": draw_errors,
        }
        supervised = any("demonstrations" in record for record in records)
        for_steps = {"loss": draw_loss} if supervised else of_rollouts
        for name, draw in for_steps.items():
            written.append(_save(folder.plots / f"{name}.png", lambda axes, draw=draw: draw(axes, records)))  # type: ignore[misc]
    if results:
        width = max(8.0, 2.0 + max(len(result.by_kind) for result in results.values()))
        written.append(_save(folder.plots / "accuracy.png", lambda axes: draw_accuracy(axes, results), width))
    return written


def draw_reward(axes: Axes, records: Records) -> None:
    """Mean reward of each step, and the share of right trajectories of each level."""
    steps = _steps(records)
    levels = sorted({level for record in records for level in record.get("success_by_level") or {}}, key=int)
    for place, level in enumerate(levels, start=1):
        values = _inner(records, "success_by_level", level, absent=GAP)
        axes.plot(steps, values, color=_colour(place), linewidth=1.2, marker=".", label=f"level {level}")
    axes.plot(steps, _outer(records, "reward"), color=_colour(0), linewidth=2.4, marker="o", label="all (mean reward)")
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "Reward in training rollouts", "training step", "mean reward (0 to 1)")


def draw_loss(axes: Axes, records: Records) -> None:
    """Loss of each step of a supervised run."""
    axes.plot(_steps(records), _outer(records, "loss"), color=_colour(0), linewidth=2, marker="o")
    _finish(axes, "Loss on demonstrations", "training step", "loss")


def draw_tools(axes: Axes, records: Records) -> None:
    """Share of each tool among the actions of each step."""
    steps = _steps(records)
    totals: dict[str, float] = {}
    for record in records:
        for tool, share in (record.get("tool_shares") or {}).items():
            totals[tool] = totals.get(tool, 0.0) + (share or 0.0)
    tools = sorted(totals, key=lambda tool: (-totals[tool], tool))
    named, rest = (tools, []) if len(tools) <= len(COLOURS) else (tools[: len(COLOURS) - 1], tools[len(COLOURS) - 1 :])
    for place, tool in enumerate(named):
        values = _per_cent(_inner(records, "tool_shares", tool, absent=0.0))
        axes.plot(steps, values, color=_colour(place), marker=".", label=tool)
    if rest:
        columns = [_per_cent(_inner(records, "tool_shares", tool, absent=0.0)) for tool in rest]
        values = [sum(column[row] for column in columns) for row in range(len(steps))]
        axes.plot(steps, values, color=_colour(len(named)), marker=".", label=f"{len(rest)} others")
    axes.set_ylim(bottom=0)
    _finish(axes, "Tools the planner chooses", "training step", "share of actions (%)")


def draw_turns(axes: Axes, records: Records) -> None:
    """Mean turns of a trajectory at each step."""
    axes.plot(_steps(records), _outer(records, "turns"), color=_colour(0), linewidth=2, marker="o", label="mean")
    axes.set_ylim(bottom=0)
    _finish(axes, "Length of trajectories", "training step", "turns per trajectory")


def draw_errors(axes: Axes, records: Records) -> None:
    """Share of turns that ended in an error, in all and by kind."""
    steps = _steps(records)
    kinds = sorted({kind for record in records for kind, rate in (record.get("errors") or {}).items() if rate})
    for place, kind in enumerate(kinds, start=1):
        values = _per_cent(_inner(records, "errors", kind, absent=0.0))
        axes.plot(steps, values, color=_colour(place), linewidth=1.2, marker=".", label=kind.replace("_", " "))
    total = _per_cent([GAP if record.get("errors") is None else sum(record["errors"].values()) for record in records])
    axes.plot(steps, total, color=_colour(0), linewidth=2.4, marker="o", label="any error")
    axes.set_ylim(bottom=0)
    _finish(axes, "Turns that end in an error", "training step", "share of turns (%)")


def draw_accuracy(axes: Axes, results: Mapping[str, EvaluationResult]) -> None:
    """Accuracy of each result by kind, with its 95 % bootstrap interval; all questions last."""
    levels = {kind: level for result in results.values() for kind, level in result.level_of_kind.items()}
    kinds = sorted(levels, key=lambda kind: (levels[kind], kind))
    width = 0.8 / len(results)
    sizes: dict[int, int] = {}
    for place, (name, result) in enumerate(results.items()):
        offset = (place - (len(results) - 1) / 2) * width
        estimates = {**{row: result.by_kind.get(kind) for row, kind in enumerate(kinds)}, len(kinds): result.accuracy}
        for row, found in estimates.items():
            if found is None:
                continue
            sizes[row] = found.n
            mean, low, high = (100 * value for value in (found.mean, found.low, found.high))
            axes.bar(
                row + offset,
                mean,
                width * 0.92,
                color=COLOURS[6] if name == "before" else _colour(0 if place < 2 else place),
                label=name if row == len(kinds) else None,
                yerr=[[max(mean - low, 0.0)], [max(high - mean, 0.0)]],
                error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": "#222222"},
            )
    names = [
        f"{textwrap.fill(kind.replace('_', ' '), 12)}\nlevel {levels[kind]}\nn={sizes[row]}"
        for row, kind in enumerate(kinds)
    ]
    axes.set_xticks(range(len(kinds) + 1), [*names, f"all\nn={sizes[len(kinds)]}"], fontsize=8)
    axes.set_ylim(0, 105)
    _finish(axes, "Accuracy on held-out questions, 95 % intervals", "kind of question", "accuracy (%)", steps=False)


def write_credit_plot(path: Path, credit: TrajectoryCredit, actions: Sequence[str]) -> None:
    """Draw a trajectory's values as a PNG; `actions` names each turn."""
    _save(path, lambda axes: draw_credit(axes, credit, actions), max(8.0, 2.0 + 1.4 * len(actions)))


def draw_credit(axes: Axes, credit: TrajectoryCredit, actions: Sequence[str]) -> None:
    """Expected reward before the first turn and after each, with intervals; the turning point is a thick line."""
    turns = credit.turns
    estimates = [turns[0].before, *(turn.after for turn in turns)]
    shown = [(place, found) for place, found in enumerate(estimates) if found is not None]
    if shown:
        means = [GAP if found is None else found.mean for found in estimates]
        axes.plot(range(len(means)), means, color=_colour(0), linewidth=2, marker="o", label="continuations")
        axes.errorbar(
            [place for place, _ in shown],
            [found.mean for _, found in shown],
            yerr=[
                [max(found.mean - found.low, 0.0) for _, found in shown],
                [max(found.high - found.mean, 0.0) for _, found in shown],
            ],
            fmt="none",
            ecolor=_colour(0),
            elinewidth=1.2,
            capsize=4,
        )
    shared = [turns[0].group_before, *(turn.group_after for turn in turns)]
    if any(found is not None for found in shared[:-1]):
        means = [GAP if found is None else found.mean for found in shared]
        axes.plot(range(len(means)), means, color=_colour(6), linestyle="--", marker="s", label="group")
    point = credit.turning_point
    if point is not None and point.before is not None and point.after is not None:
        place = turns.index(point)
        ends = [point.before.mean, point.after.mean]
        axes.plot([place, place + 1], ends, color=_colour(1), linewidth=4, zorder=3, label="turning point")
    names = [textwrap.fill(action, 16, max_lines=3).replace("$", r"\$") for action in actions]  # no formulas
    labels = ["start", *(f"turn {turn.turn}\n{name}" for turn, name in zip(turns, names, strict=True))]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    _finish(axes, "Expected reward, 95 % intervals", "state after", "expected reward", steps=False)


def _save(path: Path, draw: Callable[[Axes], None], width: float = 8.0) -> Path:
    """Draw on one set of axes, `width` inches wide, and write it. No global figure: nothing outlives the call."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    figure.savefig(path)
    return path


def _finish(axes: Axes, title: str, x_label: str, y_label: str, *, steps: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if steps:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _steps(records: Records) -> list[int]:
    return [int(record["step"]) for record in records]


def _outer(records: Records, key: str) -> list[float]:
    return [_number(record.get(key)) for record in records]


def _inner(records: Records, key: str, name: str, *, absent: float) -> list[float]:
    """Values of a name inside a record's mapping; `absent` where the mapping is there without it, else a gap."""
    return [GAP if record.get(key) is None else _number(record[key].get(name, absent)) for record in records]


def _per_cent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _number(value: float | None) -> float:
    return GAP if value is None else float(value)


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
