"""`midflight solve`, `eval` and `credit`: what asks questions of an agent and trains nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from midflight import looping
from midflight.cli.options import AskingOverrides, ModelOption, RecipeArgument, check_model, refuse, refuse_training
from midflight.engines.base import EngineError
from midflight.errors import InfrastructureError, UserError
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.reading import no_equals
from midflight.recipe.rules import EMBEDDED_MODEL
from midflight.slips import SECRET, may_be_secret, place_in


def solve(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    overrides: AskingOverrides = None,
    model: ModelOption = None,
    recipe: Annotated[str | None, typer.Option(help="Default: the run's own, else quickstart.")] = None,
) -> None:
    """Answer one question, showing each turn as it happens."""
    if not question.strip():
        raise UserError("QUESTION is empty; write what to ask, in quotes")
    _check_words(question, [text for text in overrides or () if "=" not in text])
    check_model(model)
    refuse_training(overrides or (), "solve")
    run_recipe = model if model is not None and (Path(model) / "recipe.yaml").is_file() else "quickstart"
    settings = load_recipe(recipe or run_recipe, overrides or (), tasks=False, training=False)

    from midflight.agent.types import Query, Turn
    from midflight.building import build_agent
    from midflight.progress import Progress
    from midflight.rendering import printable, render_claim, render_turn

    def show(turn: Turn) -> None:
        print(render_turn(turn), flush=True)

    progress = Progress()
    if settings.agent.planner_engine is None:
        progress.note(f"loading {model or settings.model.name}")
    built = build_agent(settings, model, progress=progress)
    try:
        trajectory = looping.run(built.flow.run(Query(question, seed=settings.seed), on_turn=show))
    finally:
        built.close()
        for line in built.ledger.lines():  # of what was interrupted, too
            progress.note(line)
    if trajectory.answer is None:
        raise EngineError(
            f"no answer: {trajectory.stop_reason}: {trajectory.error or 'the run ended before one was made'}"
        )
    if not trajectory.answer.text:
        raise EngineError(f"no answer: {trajectory.stop_reason}: {trajectory.error or 'the agent ended without one'}")
    print("\n" + "\n".join(map(printable, trajectory.answer.text.split("\n"))))
    if settings.agent.generator.kind == "llm":
        for claim in trajectory.answer.claims:
            print(f"  claim   {render_claim(claim)}")


def _check_words(question: str, others: Sequence[str]) -> None:
    """Refuse what stands behind the question and has no `=`: a change that lacks it, or the question's own words."""
    for word in others[:1]:
        place, asked = place_in(word), " ".join([question, *others])
        if place.partition(".")[0] in Recipe.model_fields and "." in place or SECRET.search(place):
            raise UserError(no_equals(word))
        quoted = shlex.join(["midflight", "solve", "..." if may_be_secret("", asked) else asked])
        raise UserError(f"{word}: is no key=value, so quote the question: {quoted}")


def evaluate(
    recipe: RecipeArgument,
    model: ModelOption = None,
    overrides: AskingOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trajectories: Annotated[
        Path | None, typer.Option(help="A new file for each trajectory as it ends, a line of JSON each.")
    ] = None,
) -> None:
    """Measure a model on the recipe's held-out questions; without --model that of a run folder given as recipe.

    Exit code 1 where infrastructure failures or a spent budget left nothing to score.
    """
    check_model(model)
    refuse_training(overrides or (), "eval")
    settings = load_recipe(recipe, overrides or (), training=False)
    if model is None and settings.agent.planner_engine is None and Path(recipe).is_dir():
        model = recipe  # a run folder: what it trained
    if model is None and settings.agent.planner_engine is None:
        raise UserError(f"--model: missing, as agent.planner.engine = null; name one, such as --model {EMBEDDED_MODEL}")

    from midflight.evaluation.held_out import evaluate_model
    from midflight.progress import Progress
    from midflight.rendering import losses, unscored

    progress = Progress()
    text, data = evaluate_model(settings, model, progress, trajectories)
    print(json.dumps(data) if as_json else text)
    if data["accuracy"] is None:
        why = unscored(data["stop_reasons"], data["budget_spent"], data["infrastructure_reasons"])
        raise InfrastructureError(f"nothing was measured: {why}")
    if data["infrastructure"]:
        progress.note(losses(data["infrastructure"], data["n"], data["infrastructure_reasons"]))


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
        refuse({**drawn, "--group-only": group_only, "--plot": plot}, "needs a TRAJECTORY; give its id")
    else:
        refuse({"--phase": phase, "--step": step}, "filters the list; leave it out with a TRAJECTORY")
    if group_only:
        refuse(drawn, "does nothing with --group-only; leave one of them out")
    check_model(model)

    from midflight.evaluation import crediting
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
