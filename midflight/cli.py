"""The command line. Each command checks all it was given, then imports what it needs, then works.

Invariant: what the user can put right is one line on stderr and exit code 2; Ctrl-C, SIGTERM and SIGHUP are one line
and exit code 130, 143 and 129.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from midflight import __version__, signals
from midflight.agent.prompting import cut_middle
from midflight.engines.base import EngineError, PromptTooLong
from midflight.errors import NO_ROOM, TrainingStopped, UserError
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.resuming import check_run_folder, evaluates, going_on
from midflight.recipe.rules import EMBEDDED_MODEL
from midflight.rendering import printable
from midflight.store.folder import RunFolder
from midflight.store.seals import whole_checkpoints
from midflight.tools.base import InfrastructureError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A tool-using agent of four modules, and Flow-GRPO, which trains its planner while it plans.",
)

RecipeArgument = Annotated[
    str, typer.Argument(help="A YAML file, a run folder, or a shipped recipe such as quickstart.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, such as training.steps=10.")]
AskingOverrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, such as agent.max_turns=6.")]
ClickException: type[BaseException] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""Base of what typer raises for a wrong command line; newer versions carry their own click."""
MOST_CHARACTERS = 1000
"""Of an error's line."""
SIGNALLED = 128
"""An exit code above it says by which signal, as shells have it."""


def main() -> None:
    """The console script."""
    signals.catch()
    code = run(sys.argv[1:])
    if code > SIGNALLED:  # the engine's thread may be in the middle of a batch that nobody waits for any more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="midflight", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("midflight"):
            raise
        return _fail(f"{error.name} is not installed; run pip install 'midflight[train,tools,engines]'", 2)
    except OSError as error:
        if error.errno in NO_ROOM:
            return _fail(f"{error.filename or 'a file'}: {error.strerror}; make room, then try again", 1)
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}; name another file or folder, or change its rights", 2)
    except (EngineError, InfrastructureError, PromptTooLong, TrainingStopped) as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(*_interrupted())
    except ClickException as error:
        message = str(getattr(error, "format_message", error.__str__)())
        return _fail(f"{message} See midflight --help." if message else "see midflight --help.", 2)


def _fail(message: str, code: int) -> int:
    """Print one line; of a very long one the middle is cut, since its end says what to do."""
    print(f"midflight: {printable(cut_middle(' '.join(message.split()), MOST_CHARACTERS))}", file=sys.stderr)
    return code


def _interrupted(and_then: str = "") -> tuple[str, int]:
    """Line and exit code."""
    by = signals.interrupted_by()
    name = "" if by is signal.SIGINT else f" by {by.name}"
    return f"interrupted{name}{and_then}", SIGNALLED + by


def _version(show: bool) -> None:
    if show:
        print(f"midflight {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""


@app.command()
def solve(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    overrides: AskingOverrides = None,
    model: Annotated[str | None, typer.Option(help="A run folder, smollm2-135m, a Hub name or a model folder.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Default: the run's own, else quickstart.")] = None,
) -> None:
    """Answer one question, showing each turn as it happens."""
    if not question.strip():
        raise UserError("QUESTION is empty; write what to ask, in quotes")
    words = [question, *(text for text in overrides or () if "=" not in text)]
    if len(words) > 1:
        quoted = shlex.join(["midflight", "solve", " ".join(words)])
        raise UserError(f"{words[1]}: is no key=value, so quote the question: {quoted}")
    _check_model(model)
    _refuse_training(overrides or (), "solve")
    run_recipe = model if model is not None and (Path(model) / "recipe.yaml").is_file() else "quickstart"
    settings = load_recipe(recipe or run_recipe, overrides or (), tasks=False, training=False)

    from midflight.agent.types import Query, Turn
    from midflight.building import build_agent
    from midflight.progress import Progress
    from midflight.rendering import plain, render_turn

    def show(turn: Turn) -> None:
        print(render_turn(turn), flush=True)

    progress = Progress()
    if settings.agent.planner.engine is None:
        progress.note(f"loading {model or settings.model.name}")
    built = build_agent(settings, model, progress=progress)
    try:
        trajectory = asyncio.run(built.flow.run(Query(question, seed=settings.seed), on_turn=show))
    finally:
        built.close()
    for line in built.ledger.lines():
        progress.note(line)
    if trajectory.answer is None:
        raise EngineError(
            f"no answer: {trajectory.stop_reason}: {trajectory.error or 'the run ended before one was made'}"
        )
    if not trajectory.answer.text:
        raise EngineError(f"no answer: {trajectory.stop_reason}: the agent ended without one")
    print(f"\n{trajectory.answer.text}")
    for claim in trajectory.answer.claims:
        if not claim.supported:
            print(f"unsupported: {plain(claim.text)}")


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME-seedSEED.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
) -> None:
    """Train the planner; evaluates before and after, and prints the report."""
    settings = load_recipe(recipe, overrides or ())
    if dry_run:
        from midflight.dry_run import describe

        print(describe(settings), end="")
        return
    folder = run_dir or _default_run_dir(recipe, settings)
    check_run_folder(folder, settings, resume=resume)

    from midflight.progress import Progress
    from midflight.training.trainer import train as train_planner

    try:
        train_planner(settings, folder, resume=resume, progress=Progress())
    except KeyboardInterrupt:
        raise typer.Exit(_fail(*_interrupted(_going_on(recipe, overrides or [], folder)))) from None
    print_report(folder)


@app.command()
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
    settings = load_recipe(recipe, overrides or ())
    folder = run_dir or _default_run_dir(recipe, settings, "sft", resume=resume)

    from midflight.training.demonstrations import Wanted, kept, select

    wanted = None
    if not resume:
        least = 1.0 if min_reward is None else min_reward
        wanted = Wanted(tuple(sources or ()), phase or "train", least, per_question)
    if dry_run:
        from midflight.dry_run import describe
        from midflight.evaluating import listed_tasks

        held_out = listed_tasks(settings.eval_tasks)
        selection = kept(RunFolder(folder)) if wanted is None else select(wanted, settings, held_out)
        print(f"{describe(settings, len(selection.records))}\nDemonstrations\n  {selection.line()}")
        return
    check_run_folder(folder, settings, resume=resume, command="sft")

    from midflight.progress import Progress
    from midflight.training.sft import sft as train_planner

    try:
        train_planner(settings, folder, wanted, progress=Progress())
    except KeyboardInterrupt:
        raise typer.Exit(_fail(*_interrupted(_going_on(recipe, overrides or [], folder, "sft")))) from None
    print_report(folder)


def _default_run_dir(recipe: str, settings: Recipe, command: str = "train", *, resume: bool = True) -> Path:
    """A run that is given as recipe goes on in its own folder, unless it only lends its recipe to a new one."""
    given = Path(recipe)
    if resume and (given / "recipe.yaml").is_file():
        return given
    kind = "" if command == "train" else f"-{command}"
    return Path("runs") / f"{settings.name}{kind}-seed{settings.seed}"


def _going_on(recipe: str, overrides: Sequence[str], folder: Path, command: str = "train") -> str:
    if not (folder / "recipe.yaml").is_file():
        return f" before anything was saved in {folder}; start again"
    line = shlex.join(["midflight", command, recipe, *overrides, "--run-dir", str(folder), "--resume"])
    saved = whole_checkpoints(RunFolder(folder).checkpoints)
    if not saved:
        return f" before the first checkpoint; begin again with: {line}"
    return f"; the checkpoint {saved[-1].name} is kept, go on with: {line}"


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    model: Annotated[str | None, typer.Option(help="A run folder, smollm2-135m, a Hub name or a model folder.")] = None,
    overrides: AskingOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model on the recipe's held-out questions."""
    _check_model(model)
    _refuse_training(overrides or (), "eval")
    settings = load_recipe(recipe, overrides or (), training=False)
    if model is None and settings.agent.planner.engine is None:
        raise UserError(f"--model: missing, as agent.planner.engine = null; name one, such as --model {EMBEDDED_MODEL}")

    from midflight.evaluating import evaluate_model
    from midflight.progress import Progress

    text, data = evaluate_model(settings, model, Progress())
    print(json.dumps(data) if as_json else text)


def _check_model(model: str | None) -> None:
    if model is not None:
        from midflight.recipe.rules import check_model_name

        check_model_name(model, f"--model {model}")


def _refuse_training(overrides: Sequence[str], command: str) -> None:
    """Refuse changes to what only training uses."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip().split(".")[0] in ("training", "sft"):
            raise UserError(f"{key.strip()} = {value}: does nothing in midflight {command}; leave it out")


@app.command()
def credit(
    run: Annotated[Path, typer.Option(help="A run folder.")],
    trajectory: Annotated[
        int | None, typer.Argument(help="Its id in the run's store; without one the last are listed.")
    ] = None,
    continuations: Annotated[
        int | None, typer.Option(min=1, help="From each state, at the training temperature. Default: 16.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Who continues. Default: the run's newest checkpoint.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the continuations. Default: the run's.")] = None,
    group_only: Annotated[
        bool, typer.Option("--group-only", help="No continuations and no model: the group's estimates alone.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the values as a PNG.")] = None,
    phase: Annotated[str | None, typer.Option(help="In the list: train, before or after.")] = None,
    step: Annotated[int | None, typer.Option(help="In the list: a training step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which turn was the turning point: what each turn changed in the expected reward.

    A state's value is the mean reward of continuations at the training temperature: greedy ones would all be the same.
    """
    drawn = {"--continuations": continuations, "--model": model, "--seed": seed}
    if trajectory is None:
        _refuse({**drawn, "--group-only": group_only, "--plot": plot}, "needs a TRAJECTORY; give its id")
    else:
        _refuse({"--phase": phase, "--step": step}, "filters the list; leave it out with a TRAJECTORY")
    if group_only:
        _refuse(drawn, "does nothing with --group-only; leave one of them out")
    _check_model(model)

    from midflight import crediting
    from midflight.progress import Progress

    if trajectory is None:
        text, lines = crediting.list_trajectories(run, phase, step)
        print(json.dumps(lines) if as_json else text)
        return
    if plot is not None:
        crediting.check_plot(plot)
    how = None if group_only else crediting.Continuing(continuations or crediting.CONTINUATIONS, model, seed)
    credited = crediting.credit_trajectory(run, trajectory, how, Progress())
    print(json.dumps(credited.to_json()) if as_json else crediting.render_credit(credited))
    if plot is not None:
        crediting.plot(plot, credited)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse the first option that was given."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UserError(f"{name}: {why}")


tools_app = typer.Typer(help="The tools that a recipe can name.", invoke_without_command=True)
app.add_typer(tools_app, name="tools")


@tools_app.callback()
def list_tools(context: typer.Context) -> None:
    """List the tools that a recipe can name, with what is missing to use each; or run one."""
    if context.invoked_subcommand is None:
        from midflight.trying import listing

        print(listing())


@tools_app.command(name="run")
def run_tool(
    name: Annotated[str, typer.Argument(help="Of a tool, or file.py:attribute for one of your own.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to call it with.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="Of the tool; can be given again.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose options, own tools, MCP servers, sandbox and engines to use.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time limit, where the tool has no own.")] = 60.0,
) -> None:
    """Call one tool once and print its result; exit code 1 and the kind of error where it is one."""
    from midflight.trying import shown, try_tool

    result = try_tool(name, arguments or [], option or [], recipe, seconds)
    if result.error is not None:
        raise typer.Exit(_fail(f"{result.error.value}: {shown(result)}", 1))
    print(shown(result))


@app.command()
def doctor() -> None:
    """Check that this machine has what training needs."""
    from midflight.doctor import diagnose, healthy

    checks = diagnose()
    for check in checks:
        print(check.line())
    if not healthy(checks):
        raise typer.Exit(1)


@app.command()
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
        raise UserError(f"run {folder}: no report yet; finish it with: {going_on(folder)}")
    else:
        print(f"{folder} has no held-out questions, so no report; its steps are in {RunFolder(folder).metrics}")


if __name__ == "__main__":
    main()
