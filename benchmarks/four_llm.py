"""The agent of four language models, before and after training: what it reaches, and where it loses.

Usage: python benchmarks/four_llm.py [--seeds 0] [--recipe four-llm] [--run-dir DIR]
           [--reuse] [--json] [key=value ...]

Prints one object (as tables without --json):
  seeds: one entry a seed
    seed, run, seconds, peak_gb   as in benchmarks/quickstart.py; a failed run has seed, run and error
    before, after: of the held-out questions, greedy
      accuracy, interval, n       share of 1, bootstrap over questions (95 %), trajectories
      by_kind, by_level           the same for each
      stop_reasons                trajectories by why they ended
      mean_turns                  turns a trajectory
      error_rates                 share of the module's attempts that failed:
        planner                   turns whose text is no action or names no tool
        executor                  tool turns whose arguments broke the schema
        tool                      calls that failed or ran out of time
        verifier                  verdicts that could not be read
        generator                 answers that are empty
      causes                      wrong answers by first cause (benchmarks/causes.py), most frequent first
Exit code 1 when a run failed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from causes import first_cause, needed_tools
from common import Run, arguments, figure, parse, run, show_interval

from midflight.agent.types import ErrorKind
from midflight.agent.verifier import UNREADABLE
from midflight.evaluation import EvaluationResult, Scored
from midflight.evaluation.text import table
from midflight.tools.base import FINISH


def error_rates(scored: Sequence[Scored]) -> dict[str, float | None]:
    """By module, failures over attempts; None where it was never asked."""
    turns = [turn for item in scored for turn in item.trajectory.turns]
    bad_plan = [turn for turn in turns if turn.result.error in (ErrorKind.INVALID_ACTION, ErrorKind.UNKNOWN_TOOL)]
    executed = [turn for turn in turns if turn not in bad_plan and turn.action and turn.action.tool != FINISH]
    invalid = [turn for turn in executed if turn.result.error is ErrorKind.INVALID_ARGUMENTS]
    failed = [turn for turn in executed if turn.result.error in (ErrorKind.TOOL_ERROR, ErrorKind.TOOL_TIMEOUT)]
    judged = [turn for turn in turns if turn.action and turn.action.tool != FINISH]
    answers = [item.trajectory.answer for item in scored if item.trajectory.answer is not None]
    return {
        "planner": _share(len(bad_plan), len(turns)),
        "executor": _share(len(invalid), len(executed)),
        "tool": _share(len(failed), len(executed) - len(invalid)),
        "verifier": _share(sum(turn.verdict.reason == UNREADABLE for turn in judged), len(judged)),
        "generator": _share(sum(not answer.text.strip() for answer in answers), len(answers)),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def causes(scored: Sequence[Scored]) -> dict[str, int]:
    """Wrong answers by first cause, most frequent first."""
    found = (first_cause(item.task, item.trajectory, needed_tools(item.task)) for item in scored)
    return {cause.value: count for cause, count in Counter(one for one in found if one is not None).most_common()}


def phase(result: EvaluationResult, scored: Sequence[Scored]) -> dict[str, Any]:
    """The figures of one evaluation."""
    return {
        **figure(result.accuracy),
        "by_kind": {kind: figure(found) for kind, found in result.by_kind.items()},
        "by_level": {str(level): figure(found) for level, found in result.by_level.items()},
        "stop_reasons": result.stop_reasons,
        "mean_turns": result.mean_turns,
        "error_rates": error_rates(scored),
        "causes": causes(scored),
    }


def entry(one: Run) -> dict[str, Any]:
    """One seed's figures."""
    if one.error is not None:
        return {"seed": one.seed, "run": str(one.folder), "error": one.error}
    return {
        "seed": one.seed,
        "run": str(one.folder),
        "seconds": one.seconds,
        "peak_gb": one.peak_gb,
        "before": phase(one.before, one.scored("before")),
        "after": phase(one.after, one.scored("after")),
    }


def render(found: Mapping[str, Any]) -> str:
    """The object as tables."""
    blocks = []
    for one in found["seeds"]:
        if "error" in one:
            blocks.append(f"seed {one['seed']} failed: {one['error']}")
            continue
        before, after = one["before"], one["after"]
        rows = [["all", *(show_interval(part["accuracy"], part["interval"]) for part in (before, after))]]
        for group in ("by_level", "by_kind"):
            for name in before[group]:
                cells = [
                    show_interval(part[group][name]["accuracy"], part[group][name]["interval"])
                    for part in (before, after)
                ]
                rows.append([f"level {name}" if group == "by_level" else name, *cells])
        blocks.append(f"seed {one['seed']}\n" + table(["accuracy", "before", "after"], rows))
        blocks.append(_counts("stop reason", before["stop_reasons"], after["stop_reasons"]))
        blocks.append(_counts("error rate", before["error_rates"], after["error_rates"]))
        blocks.append(_counts("cause of wrong answers", before["causes"], after["causes"]))
    return "\n\n".join(blocks)


def _counts(title: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    rows = [[name, cell(before.get(name, 0)), cell(after.get(name, 0))] for name in {**after, **before}]
    return table([title, "before", "after"], rows)


def main(given: Sequence[str] | None = None) -> int:
    options = parse(arguments(__doc__ or "", "four-llm", (0,)), given)
    runs = [
        run(options.recipe, seed, options.overrides, options.run_dir, reuse=options.reuse) for seed in options.seeds
    ]
    found = {"seeds": [entry(one) for one in runs]}
    print(json.dumps(found, indent=2) if options.as_json else render(found))
    return int(any(one.error is not None for one in runs))


if __name__ == "__main__":
    sys.exit(main())
