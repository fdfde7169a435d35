"""What the benchmarks share: training runs in fresh processes, and reading what a run folder holds.

Invariant: time and memory are of the whole process of a run, imports included; a run that failed is an entry with
`error`, never one left out; and a finished run is taken again only when asked, and only if its recipe is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.cli.options import is_idle
from midflight.errors import UserError
from midflight.evaluation import EvaluationResult, Scored, bootstrap_mean
from midflight.evaluation.statistics import Estimate, counted_reward
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.resuming import first_change, read_recipe
from midflight.store import RunFolder, Store
from midflight.store.metrics import read_metrics

SPENT = "benchmark.json"
"""In a run folder: what the process took."""


@dataclass(frozen=True)
class Run:
    """One finished or failed run. `error` is one line; with it only `seed` and `folder` mean something."""

    seed: int
    folder: Path
    seconds: float | None = None
    """Wall clock of the process; None where a reused run was not started by a benchmark."""
    peak_gb: float | None = None
    """Largest resident memory of the process, in 10^9 bytes; None as above."""
    error: str | None = None

    @property
    def before(self) -> EvaluationResult:
        return EvaluationResult.load(RunFolder(self.folder).eval_before)

    @property
    def after(self) -> EvaluationResult:
        return EvaluationResult.load(RunFolder(self.folder).eval_after)

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(RunFolder(self.folder).metrics)

    def scored(self, phase: str) -> list[Scored]:
        """The held-out questions with trajectory and reward, of phase `before` or `after`."""
        with Store(RunFolder(self.folder).store) as store:
            records = store.trajectories(store.runs()[-1].id, phase)
        return [Scored(one.task, one.trajectory, one.reward or 0.0) for one in records]


def arguments(description: str, recipe: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--recipe", default=recipe)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/benchmarks"), help="holds one folder a run")
    parser.add_argument("--reuse", action="store_true", help="take finished runs of the same recipe found in --run-dir")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    return parser


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, overrides allowed anywhere, also after `--seeds 0 1`."""
    words = list(sys.argv[1:] if given is None else given)
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in overrides])
    options.overrides = [*options.overrides, *overrides]
    return options


def run(
    recipe: str,
    seed: int,
    overrides: Sequence[str],
    parent: Path,
    *,
    reuse: bool,
    label: str | None = None,
    teacher: Path | None = None,
) -> Run:
    """Train `recipe` with `seed` in a fresh process; the folder is `parent/LABEL-seedSEED`, LABEL the recipe's name.

    With a `teacher`, a run, on its successful trajectories (`midflight sft`).
    """
    kind, source = ("train", []) if teacher is None else ("sft", ["--from", str(teacher)])
    changes = [f"seed={seed}", *(one for one in overrides if not is_idle(one, kind))]  # some are for the other arms
    try:
        wanted = load_recipe(recipe, changes)
    except UserError as error:
        return Run(seed, parent / f"{label or recipe}-seed{seed}", error=str(error))
    folder = parent / f"{label or wanted.name}-seed{seed}"
    if reuse and RunFolder(folder).report_json.is_file():
        return _finished(seed, folder, wanted)
    parent.mkdir(parents=True, exist_ok=True)
    log = parent / f"{folder.name}.log"
    print(f"training {folder} (progress in {log})", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "midflight", kind, recipe, *changes, "--run-dir", str(folder), *source]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return Run(seed, folder, error=f"exit code {process.returncode}: {lines[-1] if lines else 'no output'}")
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    spent = {"seconds": round(seconds, 2), "peak_gb": round(kilobytes * 1024 / 1e9, 3)}
    (folder / SPENT).write_text(json.dumps(spent) + "\n", encoding="utf-8")
    return _finished(seed, folder, wanted)


def environment() -> dict[str, str]:
    """That of this process, with this checkout's package found first."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _finished(seed: int, folder: Path, wanted: Recipe) -> Run:
    """The run in `folder`, or an error where it was made by another recipe or lacks a file."""
    paths = RunFolder(folder)
    missing = [
        one.name
        for one in (paths.report_json, paths.eval_before, paths.eval_after, paths.metrics, paths.store)
        if not one.is_file()
    ]
    if missing:
        return Run(seed, folder, error=f"{folder} has no {missing[0]}: the run did not finish")
    change = first_change(read_recipe(paths.recipe), wanted)
    if change is not None:
        return Run(
            seed, folder, error=f"{folder} was made with another {change[0]}; name another --run-dir or remove it"
        )
    spent: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError):
        spent = json.loads((folder / SPENT).read_text(encoding="utf-8"))
    return Run(seed, folder, spent.get("seconds"), spent.get("peak_gb"))


def low_high(estimate: Estimate | None) -> list[float] | None:
    """The bootstrap interval of an estimate as [low, high]."""
    return None if estimate is None else [estimate.low, estimate.high]


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate as it goes into JSON."""
    return {"accuracy": estimate.mean, "interval": low_high(estimate), "n": estimate.n}


def pooled(scored: Sequence[Scored], resamples: int = 2000) -> Estimate:
    """Mean reward of trials of several seeds; a question's trials are drawn together."""
    rewards = [counted_reward(item) for item in scored]
    low, high = bootstrap_mean(rewards, clusters=[item.task.id for item in scored], resamples=resamples)
    return Estimate(sum(rewards) / len(rewards), low, high, len(rewards))


def show_interval(mean: float | None, bounds: Sequence[float] | None) -> str:
    """`0.871 [0.824, 0.917]`, or a dash."""
    if mean is None:
        return "-"
    return f"{mean:.3f}" if bounds is None else f"{mean:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"
