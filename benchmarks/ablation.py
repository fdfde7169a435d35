"""The ablation: frozen planner, advantages normalised over turns, Flow-GRPO; same recipe, seeds, questions and budget.

Usage: python benchmarks/ablation.py [--seeds 0 1 2] [--recipe quickstart] [--run-dir DIR]
           [--arms turn_normalised [sft]] [--reuse] [--json] [key=value ...]

The frozen planner is the evaluation before training of the Flow-GRPO runs. With --reuse the Flow-GRPO arm takes the
runs of benchmarks/quickstart.py in the same --run-dir. The arm sft, not among those by default, is supervised training
on the successful training rollouts of the Flow-GRPO run of the same seed (`midflight sft`).

Prints one object (as tables without --json):
  arms: by name (frozen, flow_grpo and those of --arms)
    seeds                 one entry a seed: seed, run, accuracy, interval, n, by_level, seconds; or seed, run, error
    accuracy, interval, n all seeds together; a question's answers under all seeds are drawn together in the
                          bootstrap (absent when every run failed)
    by_level              the same by level
  difference: flow_grpo minus turn_normalised, paired by seed and question
    accuracy, interval    all questions (bootstrap over questions, 95 %); seeds are few and are not resampled
    by_level              the same by level
    seeds                 those in which both arms finished
  sft_difference: flow_grpo minus sft, likewise
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common import Run, arguments, figure, parse, pooled, run, show_interval

from midflight.evaluation import Scored, bootstrap_mean
from midflight.evaluation.statistics import counted_reward
from midflight.evaluation.text import table

OTHERS = ("turn_normalised", "sft")


def by_level(scored: Sequence[Scored]) -> dict[str, Any]:
    """Accuracy of each level."""
    levels = sorted({item.task.level for item in scored})
    return {str(level): figure(pooled([item for item in scored if item.task.level == level])) for level in levels}


def arm(runs: Sequence[Run], phase: str) -> dict[str, Any]:
    """One arm's figures from phase `before` or `after` of its runs."""
    entries: list[dict[str, Any]] = []
    everything: list[Scored] = []
    for one in runs:
        if one.error is not None:
            entries.append({"seed": one.seed, "run": str(one.folder), "error": one.error})
            continue
        scored = one.scored(phase)
        everything += scored
        entries.append(
            {
                "seed": one.seed,
                "run": str(one.folder),
                **figure(pooled(scored)),
                "by_level": by_level(scored),
                "seconds": one.seconds if phase == "after" else None,
            }
        )
    if not everything:
        return {"seeds": entries}
    return {"seeds": entries, **figure(pooled(everything)), "by_level": by_level(everything)}


def paired_difference(pairs: Sequence[tuple[Sequence[Scored], Sequence[Scored]]]) -> dict[str, Any]:
    """Mean of first minus second over the same questions; one pair of evaluations a seed.

    Raises:
        ValueError: a pair asks different questions.
    """
    differences: list[tuple[str, int, float]] = []
    for first, second in pairs:
        one, two = _by_question(first), _by_question(second)
        if set(one) != set(two):
            raise ValueError(f"the arms were asked different questions, such as {min(set(one) ^ set(two))}")
        levels = {item.task.id: item.task.level for item in first}
        differences += [(name, levels[name], one[name] - two[name]) for name in one]

    def estimate(chosen: Sequence[tuple[str, int, float]]) -> dict[str, Any]:
        values = [value for _, _, value in chosen]
        low, high = bootstrap_mean(values, clusters=[name for name, _, _ in chosen])
        return {"accuracy": sum(values) / len(values), "interval": [low, high], "n": len(values)}

    levels = sorted({level for _, level, _ in differences})
    return {
        **estimate(differences),
        "by_level": {str(level): estimate([one for one in differences if one[1] == level]) for level in levels},
    }


def _by_question(scored: Sequence[Scored]) -> dict[str, float]:
    trials: dict[str, list[float]] = {}
    for item in scored:
        trials.setdefault(item.task.id, []).append(counted_reward(item))
    return {name: sum(values) / len(values) for name, values in trials.items()}


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The whole object from the runs of the trained arms, in the order of the seeds."""
    arms = {"frozen": arm(runs["flow_grpo"], "before")}
    arms |= {name: arm(one, "after") for name, one in runs.items()}
    keys = {"turn_normalised": "difference", "sft": "sft_difference"}
    return {"arms": arms, **{keys[name]: _difference(runs, name) for name in OTHERS if name in runs}}


def _difference(runs: Mapping[str, Sequence[Run]], other: str) -> dict[str, Any] | None:
    """Flow-GRPO minus another arm, over the seeds in which both finished."""
    both = [
        (ours, theirs)
        for ours, theirs in zip(runs["flow_grpo"], runs[other], strict=True)
        if ours.error is None and theirs.error is None
    ]
    if not both:
        return None
    pairs = [(ours.scored("after"), theirs.scored("after")) for ours, theirs in both]
    return {**paired_difference(pairs), "seeds": [ours.seed for ours, _ in both]}


def render(found: Mapping[str, Any]) -> str:
    """The object as tables."""
    levels = sorted({level for one in found["arms"].values() for level in one.get("by_level", {})})
    headers = ["arm", "seed", "accuracy", *(f"level {level}" for level in levels)]
    rows, failures = [], []
    for name, one in found["arms"].items():
        for part in one["seeds"]:
            if "error" in part:
                failures.append(f"{name}, seed {part['seed']} failed: {part['error']}")
            else:
                rows.append([name, str(part["seed"]), *_cells(part, levels)])
        if "accuracy" in one:
            rows.append([name, "all", *_cells(one, levels)])
    for key, other in (("difference", "turn_normalised"), ("sft_difference", "sft")):
        difference = found.get(key)
        if difference is not None:
            rows.append([f"flow_grpo - {other}", "paired", *_cells(difference, levels)])
    return "\n".join([*([table(headers, rows, left=2)] if rows else []), *failures])


def _cells(one: Mapping[str, Any], levels: Sequence[str]) -> list[str]:
    found = [one, *(one["by_level"].get(level) for level in levels)]
    return ["-" if part is None else show_interval(part["accuracy"], part["interval"]) for part in found]


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "", "quickstart", (0, 1, 2))
    parser.add_argument("--arms", nargs="+", choices=OTHERS, default=OTHERS[:1], help="beside Flow-GRPO")
    options = parse(parser, given)
    recipe, parent, reuse = options.recipe, options.run_dir, options.reuse
    short = recipe.rsplit("/", 1)[-1].split(".")[0]
    runs: dict[str, list[Run]] = {name: [] for name in (*OTHERS, "flow_grpo") if name in (*options.arms, "flow_grpo")}
    for seed in options.seeds:
        taught = run(recipe, seed, [*options.overrides, "training.advantage=flow_grpo"], parent, reuse=reuse)
        runs["flow_grpo"].append(taught)
        if "turn_normalised" in runs:
            changes, label = [*options.overrides, "training.advantage=turn_normalised"], f"{short}-turn_normalised"
            runs["turn_normalised"].append(run(recipe, seed, changes, parent, reuse=reuse, label=label))
        if "sft" in runs:
            done = replace(taught, error=f"its teacher failed: {taught.error}")
            if taught.error is None:
                changes, label = [*options.overrides], f"{short}-sft"
                done = run(recipe, seed, changes, parent, reuse=reuse, label=label, teacher=taught.folder)
            runs["sft"].append(done)
    found = compare(runs)
    print(json.dumps(found, indent=2) if options.as_json else render(found))
    return int(any(one.error is not None for arm_runs in runs.values() for one in arm_runs))


if __name__ == "__main__":
    sys.exit(main())
