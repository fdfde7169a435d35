"""How the cost of our rollout grows: with the group size, the turns, and the memory that a turn reads.

Group size and turns are live rollouts of the recipe with that one setting changed. Memory is the worst case: every
trajectory remembers something else, so that behind the question nothing is shared. `memory_new` is the first turn of
all trajectories with so much memory, none of it known; `memory_known` the next one, of which the engine has seen all
but the last turn, if its prefix tree has the room (`model.prefix_tokens`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rollout_cost import counting
from rollout_work import Call, Rollout, Timing, Workload, replay

from midflight.engines.base import Message
from midflight.engines.local import LocalEngine
from midflight.evaluation.plots import COLOURS
from midflight.evaluation.text import table
from midflight.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUP_SIZES = (4, 8, 16)
MAX_TURNS = (1, 2, 3, 4)
MEMORY_TOKENS = (0, 64, 128, 256, 512)

AXES = {
    "group_size": "trajectories of a query",
    "max_turns": "most turns of a trajectory",
    "memory_new": "tokens of memory, none known",
    "memory_known": "tokens of memory, all but the last turn known",
}

Point = dict[str, float]
"""`value` on its axis, `seconds` (median), and tokens: drawn, total, unique and computed, as in rollout_speed.py."""

Measure = Callable[[], dict[str, Point]]


def sweep(recipe: Recipe, repeats: int, note: Callable[[str], None]) -> dict[str, list[Point]]:
    """The points of each axis; all are measured once before any is measured again."""
    base = Rollout(recipe)
    engine = base.engine()
    try:
        _, work = base.live(engine)  # also what is slow only once
        memories = {tokens: remembering(work, tokens, engine.count_tokens) for tokens in MEMORY_TOKENS}
    finally:
        engine.close()
    measures: list[Measure] = [
        *(_live(_with(base, "training", group_size=size), "group_size", size) for size in GROUP_SIZES),
        *(_live(_with(base, "agent", max_turns=turns), "max_turns", turns) for turns in MAX_TURNS),
        *(_memory(base, tokens, *works) for tokens, works in memories.items()),
    ]
    found: list[list[dict[str, Point]]] = [[] for _ in measures]
    for number in range(repeats):
        for measure, kept in zip(measures, found, strict=True):
            kept.append(measure())
            for axis, point in kept[-1].items():
                note(f"repeat {number + 1}/{repeats}: {axis} {point['value']:.0f}, {point['seconds']:.1f} s")
    axes: dict[str, list[Point]] = {axis: [] for axis in AXES}
    for kept in found:
        for axis, point in kept[0].items():
            axes[axis].append({**point, "seconds": round(median(one[axis]["seconds"] for one in kept), 3)})
    return axes


def _with(base: Rollout, section: str, **changes: Any) -> Rollout:
    changed = getattr(base.recipe, section).model_copy(update=changes)
    return Rollout(base.recipe.model_copy(update={section: changed}), base.loaded)


def _live(rollout: Rollout, axis: str, value: int) -> Measure:
    def measure() -> dict[str, Point]:
        timing, work, forwards = rollout.counted()
        return {axis: _point(value, timing, work, forwards.positions)}

    return measure


def _memory(rollout: Rollout, tokens: int, first: Workload, following: Workload) -> Measure:
    def measure() -> dict[str, Point]:
        engine = rollout.engine()
        try:
            return {
                axis: _replayed(rollout, engine, work, tokens)
                for axis, work in (("memory_new", first), ("memory_known", following))
            }
        finally:
            engine.close()

    return measure


def _replayed(rollout: Rollout, engine: LocalEngine, work: Workload, tokens: int) -> Point:
    done: list[Call] = []

    async def continue_(call: Call) -> int:
        found = await engine.generate(call.request)
        done.append(Call(call.request, found.prompt_ids, found.ids))
        return len(found.ids)

    with counting(rollout.loaded.model) as forwards:
        timing = asyncio.run(replay(work, continue_))
    return _point(tokens, timing, Workload(((*done,),)), forwards.positions)


def _point(value: int, timing: Timing, work: Workload, computed: int) -> Point:
    tokens = work.tokens()
    names = ("drawn_tokens", "total_tokens", "unique_tokens")
    return {
        "value": value,
        "seconds": timing.seconds,
        "calls": len(work.calls),
        **{name: tokens[name] for name in names},
        "computed_tokens": computed,
    }


def remembering(work: Workload, tokens: int, count: Callable[[str], int]) -> tuple[Workload, Workload]:
    """The first call of each trajectory as if it remembered at least `tokens` tokens, and one turn more."""
    first, following = [], []
    for number, calls in enumerate(work.trajectories):
        parts: list[str] = []
        while sum(map(count, parts)) < tokens:
            parts.append(_turn(number, len(parts) + 1))
        first.append((_insert(calls[0], parts),))
        following.append((_insert(calls[0], [*parts, _turn(number, len(parts) + 1)]),))
    return Workload(tuple(first)), Workload(tuple(following))


def _turn(trajectory: int, turn: int) -> str:
    """A remembered turn that no other trajectory has."""
    value = 1_000_003 * (trajectory + 1) + 7919 * turn
    return f"Turn {turn}: calculator: {value} + {turn}\nResult: {value + turn}\n"


def _insert(call: Call, parts: Sequence[str]) -> Call:
    """`call` with `parts` before the last part of its last message, where memory stands."""
    *before, last = call.request.messages
    message = Message(last.role, (*last.parts[:-1], *parts, *last.parts[-1:]))
    return Call(replace(call.request, messages=(*before, message)), (), ())


def render_sweep(axes: Mapping[str, Sequence[Point]]) -> str:
    """One table an axis."""
    headers = ["", "seconds", "turns", "drawn", "tokens/s", "total", "unique", "computed"]
    blocks = []
    for axis, points in axes.items():
        rows = [
            [
                f"{one['value']:.0f}",
                f"{one['seconds']:.2f}",
                f"{one['calls']:.0f}",
                f"{one['drawn_tokens']:.0f}",
                f"{one['drawn_tokens'] / one['seconds']:.0f}",
                *(f"{one[f'{kind}_tokens']:.0f}" for kind in ("total", "unique", "computed")),
            ]
            for one in points
        ]
        blocks.append(f"{axis}: {AXES[axis]}\n" + table(headers, rows))
    return "\n\n".join(blocks)


def draw_sweep(axes: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Seconds (above) and tokens (below) over group size, turns and memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 3, sharex="col")
    for column, axis in enumerate(("group_size", "max_turns", "memory_new")):
        _line(above[column], axes[axis], "seconds", COLOURS[0], "")
        _line(below[column], axes[axis], "total_tokens", COLOURS[2], "total")
        _line(below[column], axes[axis], "computed_tokens", COLOURS[0], "computed")
        _line(below[column], axes[axis], "unique_tokens", COLOURS[7], "unique", style=":")
        below[column].set_xlabel(AXES[axis])
    _line(above[2], axes["memory_known"], "seconds", COLOURS[1], "")
    _line(below[2], axes["memory_known"], "computed_tokens", COLOURS[1], "computed, memory known")
    for one in (*above, *below):
        one.set_ylim(bottom=0, top=1.05 * max(max(line.get_ydata()) for line in one.lines))
    above[0].set_ylabel("seconds")
    below[0].set_ylabel("tokens")
    for one in below:
        one.legend(frameon=False)
    figure.suptitle("What a rollout costs as it grows", x=0.01, ha="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _line(axes: Axes, points: Sequence[Point], key: str, colour: str, label: str, style: str = "-") -> None:
    values = [point["value"] for point in points]
    axes.plot(values, [point[key] for point in points], style, marker="o", color=colour, label=label)
    axes.set_xticks(values)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
