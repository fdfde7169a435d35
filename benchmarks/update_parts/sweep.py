"""How the cost of an update grows with group size, turns and memory: ours against padded rows.

Rows are built to each size on the recipe's prompts (`rows.built_rows`); one size is varied at a time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from midflight.building import local_engine
from midflight.engines.local import LoadedModel
from midflight.evaluation.plots import COLOURS
from midflight.evaluation.text import table
from midflight.recipe import Recipe

from .measures import fastest, seconds
from .ours import load_bench, on_policy, packed, packed_update
from .padded import batches, padded_tokens, time_padded
from .rows import built_rows

QUERIES = 2
BASE = {"group": 8, "turns": 3, "result_tokens": 24}
VARIED = {"group": (4, 8, 16), "turns": (1, 2, 3, 4), "result_tokens": (8, 24, 72)}
LABELS = {"group": "trajectories a query", "turns": "turns a trajectory", "result_tokens": "tokens a result"}


def sweep(recipe: Recipe, micro_batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One entry a size: what was `varied`, its `value`, tokens, and median seconds of `ours` and `padded`."""
    bench = load_bench(recipe)
    model = LoadedModel(recipe.model.name, bench.sampler, bench.policy.tokenizer, bench.policy.device)
    engine = local_engine(recipe, model)
    try:
        base = on_policy(bench, built_rows(recipe, engine, queries=QUERIES, **BASE))
        size = fastest({size: partial(time_padded, bench, base, size, bench.merged) for size in micro_batches})
        points, measured = [], {}
        for varied, values in VARIED.items():
            for value in values:
                sizes = {**BASE, varied: value}
                key = tuple(sizes.values())
                if key not in measured:
                    rows = on_policy(bench, built_rows(recipe, engine, queries=QUERIES, **sizes))
                    print(f"{varied} {value}: {len(rows)} rows", file=sys.stderr, flush=True)
                    taken = [
                        (
                            seconds(lambda rows=rows: packed_update(bench, rows)),
                            time_padded(bench, rows, size, bench.merged),
                        )
                        for _ in range(repeats)
                    ]
                    batch = packed(rows, bench.settings)
                    measured[key] = {
                        "rows": len(rows),
                        "total_tokens": batch.total_tokens,
                        "unique_tokens": batch.unique_tokens,
                        "padded_tokens": padded_tokens(batches(rows, size)),
                        "ours": statistics.median(ours for ours, _ in taken),
                        "padded": statistics.median(padded for _, padded in taken),
                        "speedup": statistics.median(padded / ours for ours, padded in taken),
                    }
                points.append({"varied": varied, "value": value, **measured[key]})
    finally:
        engine.close()
    return points


def render(points: Sequence[dict[str, Any]]) -> str:
    """The entries as a table."""
    rows = [
        [
            LABELS[one["varied"]],
            *(str(one[name]) for name in ("value", "rows", "total_tokens", "unique_tokens")),
            *(f"{one[name]:.2f}" for name in ("ours", "padded", "speedup")),
        ]
        for one in points
    ]
    return table(["varied", "value", "rows", "tokens", "packed", "ours s", "padded s", "padded / ours"], rows)


def draw(points: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel a varied size: seconds of ours and of padded rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(VARIED), sharey=True)
    for panel, varied in zip(panels, VARIED, strict=True):
        of_it = [one for one in points if one["varied"] == varied]
        for way, colour in (("padded", COLOURS[1]), ("ours", COLOURS[0])):
            panel.plot([one["value"] for one in of_it], [one[way] for one in of_it], "o-", color=colour, label=way)
        panel.set_xlabel(LABELS[varied])
        panel.set_xticks([one["value"] for one in of_it])
        panel.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("seconds an update")
    panels[0].legend()
    base = ", ".join(f"{value} {LABELS[name]}" for name, value in BASE.items())
    figure.suptitle(f"Cost of an update; where not varied: {QUERIES} queries, {base}", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
