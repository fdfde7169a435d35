"""`midflight train`, `sft` and `report`: what makes a run, and what it says when it is done."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.ending import fail, interrupted
from midflight.cli.options import Overrides, RecipeArgument, refuse_idle
from midflight.errors import UserError
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.resuming import check_run_folder, evaluates, going_on
from midflight.store.folder import RunFolder
from midflight.store.seals import whole_checkpoints


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME-seedSEED.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
) -> None:
    """Train the planner; evaluates before and after, and prints the report."""
    refuse_idle(overrides or (), "train")
    settings = load_recipe(recipe, overrides or ())
    folder = run_dir or _default_run_dir(recipe, settings)
    if dry_run:
        from midflight.cli.dry_run import describe

        print(f"{describe(settings)}\nRun folder\n  {_place(folder, settings, resume, 'train')}")
        return
    check_run_folder(folder, settings, resume=resume)

    from midflight.progress import Progress
    from midflight.training.trainer import train as train_planner

    try:
        train_planner(settings, folder, resume=resume, progress=Progress())
    except KeyboardInterrupt:
        raise typer.Exit(fail(*interrupted(_going_on(recipe, overrides or [], folder)))) from None
    print_report(folder)


def sft(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    sources: Annotated[
        list[Path] | None, typer.Option("--from", metavar="RUN", help="A run to learn from; can be given again.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Of its trajectories: train, before, after, interrupted or all. Default: train.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Learn from rewards of at least this. Default: 1.")] = None,
    per_question: Annotated[
        int | None, typer.Option(help="At most so many trajectories of one question, the shortest first. Default: all.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME-sft-seedSEED.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
) -> None:
    """Train the planner to do as recorded trajectories did; evaluates before and after, and prints the report."""
    given = {"--from": sources, "--phase": phase, "--min-reward": min_reward, "--per-question": per_question}
    for option, value in given.items():
        if resume and value is not None:
            raise UserError(f"{option}: does nothing with --resume, as a run keeps its demonstrations; leave it out")
    refuse_idle(overrides or (), "sft")
    settings = load_recipe(recipe, overrides or (), supervised=True)
    folder = run_dir or _default_run_dir(recipe, settings, "sft", resume=resume)

    from midflight.training.demonstrations import Wanted, kept, select

    wanted = None
    if not resume:
        least = 1.0 if min_reward is None else min_reward
        wanted = Wanted(tuple(sources or ()), phase or "train", least, per_question)
    if dry_run:
        from midflight.cli.dry_run import describe
        from midflight.evaluation.held_out import listed_tasks

        held_out = listed_tasks(settings.eval_tasks)
        selection = kept(RunFolder(folder)) if wanted is None else select(wanted, settings, held_out)
        print(f"{describe(settings, selection.at_most(per_question))}\nDemonstrations\n  {selection.line()}")
        if per_question is not None:
            print(f"  of these at most {per_question} of one question, the shortest first")
        print(f"\nRun folder\n  {_place(folder, settings, resume, 'sft')}")
        return
    check_run_folder(folder, settings, resume=resume, command="sft")

    from midflight.progress import Progress
    from midflight.training.sft import sft as train_planner

    try:
        train_planner(settings, folder, wanted, progress=Progress())
    except KeyboardInterrupt:
        raise typer.Exit(fail(*interrupted(_going_on(recipe, overrides or [], folder, "sft")))) from None
    print_report(folder)


def _default_run_dir(recipe: str, settings: Recipe, command: str = "train", *, resume: bool = True) -> Path:
    """A run that is given as recipe goes on in its own folder, unless it only lends its recipe to a new one."""
    given = Path(recipe)
    if resume and (given / "recipe.yaml").is_file():
        return given
    kind = "" if command == "train" else f"-{command}"
    return Path("runs") / f"{settings.name}{kind}-seed{settings.seed}"


def _place(folder: Path, settings: Recipe, resume: bool, command: str) -> str:
    """Where a run would be, or why it cannot be there."""
    try:
        check_run_folder(folder, settings, resume=resume, command=command)
    except UserError as error:
        return str(error)
    return str(folder)


def _going_on(recipe: str, overrides: Sequence[str], folder: Path, command: str = "train") -> str:
    if not (folder / "recipe.yaml").is_file():
        return f" before anything was saved in {folder}; start again"
    line = shlex.join(["midflight", command, recipe, *overrides, "--run-dir", str(folder), "--resume"])
    saved = whole_checkpoints(RunFolder(folder).checkpoints)
    if not saved:
        return f" before the first checkpoint; begin again with: {line}"
    return f"; the checkpoint {saved[-1].name} is kept, go on with: {line}"


def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Print the report of a finished run."""
    print_report(run)


def print_report(folder: Path) -> None:
    """Print a run's report, or that it has none to make.

    Raises:
        UserError: no such run, or it has not finished.
    """
    file = folder / "report.txt"
    if not folder.is_dir():
        raise UserError(f"run {folder}: no such folder; runs are made by midflight train")
    if not file.is_file() and not (folder / "recipe.yaml").is_file():
        runs = sorted(str(recipe.parent) for recipe in folder.glob("*/recipe.yaml"))
        raise UserError(f"run {folder}: is not a run folder; runs in it: {', '.join(runs) or 'none'}")
    if file.is_file():
        from midflight.evaluation.report import read_report

        print(read_report(RunFolder(folder)), end="")
    elif evaluates(folder):
        with RunFolder(folder).locked():  # by a process that trains there, which has the report to make
            pass
        raise UserError(f"run {folder}: no report yet; finish it with: {going_on(folder)}")
    else:
        print(f"{folder} has no held-out questions, so no report; its steps are in {RunFolder(folder).metrics}")
