"""The quickstart's figures: accuracy before and after, time and memory, for several seeds, against the targets.

Usage: python benchmarks/quickstart.py [--seeds 0 1 2] [--recipe quickstart] [--run-dir DIR]
           [--reuse] [--json] [key=value ...]

Prints one object (as a table without --json):
  seeds: one entry a seed
    seed, run             the seed and its run folder
    error                 only where the run failed: one line, and nothing below
    before, after         greedy accuracy on the held-out questions, share of 1
    after_three_or_more_calls   the same on the questions of level 3
    before_interval, after_interval, after_three_or_more_interval   bootstrap over questions, 95 %, [low, high]
    questions             held-out questions
    seconds, peak_gb      wall clock and largest resident memory (10^9 bytes) of the process, imports included
    max_drift             largest |sampler - trainer| log-prob of a trained token over all steps
    steps                 updates in the metrics
  targets: for each of the quickstart's targets
    bound                 what it says
    met                   by seed: true or false (false for a failed run or a figure that is missing)
Exit code 1 when a run failed; a missed target is a figure, not a failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import Run, arguments, low_high, parse, run, show_interval

from midflight.evaluation.text import table

TARGETS: Mapping[str, tuple[str, str, Callable[[float], bool]]] = {
    "seconds": ("seconds", "at most 600", lambda value: value <= 600),
    "peak_gb": ("peak_gb", "at most 6", lambda value: value <= 6),
    "before": ("before", "at most 0.45", lambda value: value <= 0.45),
    "after": ("after", "at least 0.85", lambda value: value >= 0.85),
    "after_three_or_more_calls": ("after_three_or_more_calls", "at least 0.70", lambda value: value >= 0.70),
    "questions": ("questions", "at least 200", lambda value: value >= 200),
    "max_drift": ("max_drift", "at most 1e-4", lambda value: value <= 1e-4),
}
"""Name: the entry's field, the bound in words, and whether a value keeps it."""


def entry(one: Run) -> dict[str, Any]:
    """One seed's figures; see the module's docstring."""
    if one.error is not None:
        return {"seed": one.seed, "run": str(one.folder), "error": one.error}
    before, after, metrics = one.before, one.after, one.metrics()
    hard = after.three_or_more
    return {
        "seed": one.seed,
        "run": str(one.folder),
        "before": before.accuracy.mean,
        "after": after.accuracy.mean,
        "after_three_or_more_calls": None if hard is None else hard.mean,
        "before_interval": low_high(before.accuracy),
        "after_interval": low_high(after.accuracy),
        "after_three_or_more_interval": low_high(hard),
        "questions": after.questions,
        "seconds": one.seconds,
        "peak_gb": one.peak_gb,
        "max_drift": max((record["drift"] for record in metrics), default=None),
        "steps": len(metrics),
    }


def targets(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each bound, and by seed whether it is kept; a figure that is missing does not keep it."""
    return {
        name: {"bound": words, "met": {str(one["seed"]): _keeps(one.get(field), keeps) for one in entries}}
        for name, (field, words, keeps) in TARGETS.items()
    }


def _keeps(value: float | None, keeps: Callable[[float], bool]) -> bool:
    return value is not None and keeps(value)


def render(found: Mapping[str, Any]) -> str:
    """The object as a table."""
    rows, failures = [], []
    for one in found["seeds"]:
        if "error" in one:
            failures.append(f"seed {one['seed']} failed: {one['error']}")
            continue
        rows.append(
            [
                str(one["seed"]),
                show_interval(one["before"], one["before_interval"]),
                show_interval(one["after"], one["after_interval"]),
                show_interval(one["after_three_or_more_calls"], one["after_three_or_more_interval"]),
                str(one["questions"]),
                "-" if one["seconds"] is None else f"{one['seconds']:.0f}",
                "-" if one["peak_gb"] is None else f"{one['peak_gb']:.2f}",
                "-" if one["max_drift"] is None else f"{one['max_drift']:.1e}",
                str(one["steps"]),
            ]
        )
    headers = ["seed", "before", "after", "after, level 3", "questions", "seconds", "peak GB", "max drift", "steps"]
    lines = [table(headers, rows)] if rows else []
    lines += failures
    for name, target in found["targets"].items():
        missed = [seed for seed, met in target["met"].items() if not met]
        lines.append(f"{name} {target['bound']}: {'met' if not missed else 'missed by seed ' + ', '.join(missed)}")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    options = parse(arguments(__doc__ or "", "quickstart", (0, 1, 2)), given)
    entries = [
        entry(run(options.recipe, seed, options.overrides, options.run_dir, reuse=options.reuse))
        for seed in options.seeds
    ]
    found = {"seeds": entries, "targets": targets(entries)}
    print(json.dumps(found, indent=2) if options.as_json else render(found))
    return int(any("error" in one for one in entries))


if __name__ == "__main__":
    sys.exit(main())
