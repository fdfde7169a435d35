"""Supervised training on a model of a few random weights: replay, loss, resume, and what the planner does then."""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field

from midflight.agent import Query
from midflight.agent.types import Trajectory
from midflight.api import recipe_for
from midflight.building import assemble, build_agent, local_engine, toolset_of
from midflight.engines.local import LocalEngine
from midflight.errors import UserError
from midflight.evaluation import write_plots
from midflight.loading import load_named, load_trained
from midflight.progress import Progress
from midflight.recipe import Recipe, RecipeError
from midflight.recipe.reading import pin_model
from midflight.store import RunFolder, Store, read_metrics
from midflight.tasks.base import Task
from midflight.tools import tool
from midflight.training import step
from midflight.training.demonstrations import DEMONSTRATION, Wanted, select
from midflight.training.drift import DriftError
from midflight.training.replay import replay
from midflight.training.sft import Demonstrations, SupervisedTrainer, sft
from midflight.training.trainer import train
from tests.training.recorded import act, entry, record_run, trajectory
from tests.training.test_step import gap, gradients, policy_of, updater_of

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_plots")]

TIMES = {"seconds"}
DONE = act("finish")


@tool(blocking=False)
def pick(letter: Annotated[str, Field(pattern="^[abc]{1,1}$")]) -> str:
    """pick a letter"""
    return letter


@tool(blocking=False)
def note(text: str) -> str:
    """write a line"""
    return text


HELD_OUT = [Task(str(number), f"Pick another letter, number {number}.", "a") for number in range(3)]


def recipe(model: Path, *overrides: str, max_turns: int = 3) -> Recipe:
    settings = [
        "model.chat_template=false",
        "model.lora.rank=4",
        "training.learning_rate=0.01",
        "training.kl_beta=0",
        "training.save_every=2",
    ]
    return recipe_for(
        [pick, note], name="tiny", model=str(model), steps=2, max_turns=max_turns, overrides=[*settings, *overrides]
    )


def ready(recipe: Recipe) -> tuple[Any, LocalEngine]:
    """The recipe's flow as it trains, and its planner's engine."""
    engine = local_engine(recipe, load_named(recipe, recipe.model.name))
    return assemble(recipe, toolset_of(recipe, [pick, note]), engine, engine, training=True), engine


def shown(recipe: Recipe, recorded: Trajectory) -> Any:
    return replay(Task("t", recorded.query.text, "x"), recorded, *ready(recipe))


def learn(recipe: Recipe, folder: Path, wanted: Wanted | None, stream: io.StringIO | None = None) -> list[Any]:
    progress = Progress(stream or io.StringIO())
    sft(recipe, folder, wanted, progress=progress, tools=[pick, note], eval_tasks=HELD_OUT)
    records = read_metrics(RunFolder(folder).metrics)
    return [{name: value for name, value in one.items() if name not in TIMES} for one in records]


def teacher(folder: Path, turns: int = 2) -> Wanted:
    """A run that picked `a` five times and, in two turns, finished."""
    said = (act("pick", "a"), DONE)[:turns]
    entries = [entry(f"Pick a letter, number {number}.", *said) for number in range(5)]
    return Wanted((record_run(folder, entries),))


@pytest.mark.parametrize("lora", [(4, 8.0), None], ids=["lora", "full"])
def test_loss_and_gradient_are_those_of_masked_cross_entropy(model: Path, lora: tuple[int, float] | None) -> None:
    """Of rows that were not drawn: nothing is compared with a sampler, and the rollouts' temperature is not in it."""
    flow, engine = ready(recipe(model, "agent.planner.temperature=0.5"))
    recorded = trajectory("Pick one.", act("note", "b c"), DONE)
    rows = replay(Task("t", "q", "x"), recorded, flow, engine).rows
    rows = [replace(row, advantage=1.0, weight=0.5 / row.forced.count(False)) for row in rows]
    policy = policy_of(model, lora)
    updater = updater_of(policy, engine, loss="reinforce", max_drift=1e-30)
    measured = updater.update(rows, drawn=False)
    ours = gradients(policy).clone()
    for parameter in policy.parameters():
        parameter.grad = None
    loss = torch.zeros(())
    for row in rows:
        logits = policy.causal(input_ids=torch.tensor([row.prompt_ids + row.ids])).logits[
            0, len(row.prompt_ids) - 1 : -1
        ]
        assert row.grammar is not None
        masked = logits.masked_fill(~engine.masks.replay(row.grammar, row.ids), -torch.inf)
        free = ~torch.tensor(row.forced)
        loss = loss + 0.5 * torch.nn.functional.cross_entropy(masked[free], torch.tensor(row.ids)[free])
    loss.backward()  # type: ignore[no-untyped-call]
    assert measured.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert gap(ours, gradients(policy)) < 1e-5
    assert measured.drift == 0.0
    with pytest.raises(DriftError):
        updater.update(rows)


def test_every_demonstration_of_a_batch_weighs_the_same_unless_the_recipe_says_otherwise(model: Path) -> None:
    flow, engine = ready(recipe(model))
    made = [
        replay(Task("t", "q", "x"), trajectory("q", *said), flow, engine)
        for said in ((act("note", "b c d"), "nonsense", DONE), (DONE,))
    ]

    def weighted(weighting: str) -> list[float]:
        trainer = SupervisedTrainer.__new__(SupervisedTrainer)
        trainer.settings = recipe(model, f"training.weighting={weighting}").training
        rows = trainer._rows(made)
        assert {row.advantage for row in rows} == {1.0} and [row.trajectory for row in rows] == [0, 0, 1]
        return [row.weight * row.forced.count(False) for row in rows]

    assert weighted("trajectory") == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert weighted("turn") == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    free = [row.forced.count(False) for one in made for row in one.rows]
    assert weighted("token") == pytest.approx([count / sum(free) for count in free])


def test_batches_follow_from_the_seed_and_each_pass_shows_everything_once(model: Path) -> None:
    stream = Demonstrations(list(range(7)), 3, seed=1)  # type: ignore[arg-type]
    passes = [[one for step in range(first, first + 3) for one in stream.batch(step)] for first in (1, 4)]
    assert stream.batches == 3 and [len(stream.batch(step)) for step in (1, 2, 3)] == [3, 3, 1]
    assert [sorted(one) for one in passes] == [list(range(7))] * 2 and passes[0] != passes[1]
    again = Demonstrations(list(range(7)), 3, seed=1)  # type: ignore[arg-type]
    assert again.batch(5) == stream.batch(5) != Demonstrations(list(range(7)), 3, seed=2).batch(5)  # type: ignore[arg-type]


def test_an_update_that_was_skipped_leaves_the_quality_of_the_last_that_was_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([0.5, math.nan, math.inf, 0.25])
    trainer = SupervisedTrainer.__new__(SupervisedTrainer)
    trainer.settings, trainer.progress = recipe(model).training, Progress(io.StringIO())
    trainer.stream = Demonstrations([None, None], 1, seed=0)  # type: ignore[list-item]
    trainer.updater = SimpleNamespace(update=lambda rows, drawn: step.UpdateMetrics(loss=next(losses)))  # type: ignore[assignment]
    for name in ("_rows", "_set_rate", "_sync"):
        monkeypatch.setattr(SupervisedTrainer, name, lambda *_: 0.0)
    qualities = []
    for number in range(1, 5):
        trainer._step(None, 1, number)  # type: ignore[arg-type]
        qualities.append(trainer.stream.success["demonstrations"])
    assert qualities == [math.exp(-0.5)] * 3 + [math.exp(-0.25)]


@pytest.mark.parametrize(("lora", "turns"), [("model.lora.rank=4", 1), ("model.lora=null", 2)])
def test_the_planner_learns_what_it_is_shown_and_a_run_cut_off_resumes_with_the_same_numbers(
    model: Path, tmp_path: Path, lora: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = lora.endswith("null")
    settings = [
        f"training.learning_rate={0.004 if full else 0.01}",
        "training.kl_beta=0.001",
        "sft.epochs=6",
        "sft.batch_size=2",
        "agent.planner.temperature=0.3",  # of rollouts, not of the loss
    ]
    own = recipe(model, lora, *settings, max_turns=turns)
    said = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("midflight.training.session.write_plots", write_plots)
        undisturbed = learn(own, tmp_path / "one", teacher(tmp_path / "teacher", turns), said)
    assert [(one["step"], one["epoch"], one["demonstrations"]) for one in undisturbed[:4]] == [
        (1, 1, 2), (2, 1, 2), (3, 1, 1), (4, 2, 2),
    ]  # fmt: skip
    losses = [one["loss"] for one in undisturbed]
    assert len(losses) == 18 and losses[0] > (0.8 if full else 1.4) and max(losses[-3:]) < 0.02, losses
    lines = said.getvalue().splitlines()
    assert "demonstrations: 5 of 5 trajectories kept, of 5 questions; left out: none" in lines
    assert any(line.startswith("step  1/18  loss ") for line in lines)
    folder = RunFolder(tmp_path / "one")
    assert sorted(path.name for path in folder.plots.iterdir()) == ["accuracy.png", "loss.png"]
    with Store(folder.store) as store:
        after = store.trajectories(1, "after")
        before = store.trajectories(1, "before")
    assert len(before) == len(after) == 3
    assert {one.reward for one in after} == {1.0} and {one.reward for one in before} != {1.0}
    calls = [[(turn.action.tool, turn.action.context) for turn in one.trajectory.turns if turn.action] for one in after]
    assert calls == [[("pick", "a"), ("finish", "")][:turns]] * 3

    real, updates = step.Updater.update, []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        updates.append(1)
        if len(updates) == 6:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(step.Updater, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learn(own, tmp_path / "two", teacher(tmp_path / "again", turns))
    (tmp_path / "again" / "store.sqlite").unlink()  # a run needs no other once it has begun
    assert learn(own, tmp_path / "two", None) == undisturbed
    file = "model.safetensors" if full else "adapter_model.safetensors"
    ends = [(tmp_path / name / "checkpoints/step-00018" / file).read_bytes() for name in ("one", "two")]
    assert ends[0] == ends[1]

    built = build_agent(own, str(tmp_path / "one"), tools=[pick, note])
    found = asyncio.run(built.flow.run(Query("Pick some letter.")))
    built.close()
    assert found.answer is not None and found.answer.text == "a"
    warm_start(own, model, tmp_path)


def warm_start(own: Recipe, model: Path, tmp_path: Path) -> None:
    """Flow-GRPO from the supervised run: it begins as that planner, which is also its reference."""
    settings = own.model_copy(update={"model": own.model.model_copy(update={"name": str(tmp_path / "one")})})
    pinned = pin_model(settings)
    assert pinned.model.name == str((tmp_path / "one" / "checkpoints" / "step-00018").resolve())
    tasks = [Task(str(number), f"Pick a letter, number {number}.", "b") for number in range(4)]
    overrides = {"queries_per_step": 4, "steps": 1, "kl_beta": 0.5, "learning_rate": 1e-9}
    pinned = pinned.model_copy(update={"training": pinned.training.model_copy(update=overrides)})
    run = tmp_path / "warm"
    train(pinned, run, progress=Progress(io.StringIO()), tools=[pick, note], tasks=tasks)
    (record,) = read_metrics(RunFolder(run).metrics)
    with Store(RunFolder(run).store) as store:
        drawn = store.trajectories(1, "train")
    picked = [one.trajectory.answer.text for one in drawn if one.trajectory.answer is not None]
    assert len(picked) == 32 and picked.count("a") > 25
    assert record["trained_tokens"] == 0 or abs(record["kl"]) < 1e-6
    loaded, root = load_trained(pinned, str(run), print)
    assert (root, Path(loaded.name)) == (str(model), run / "checkpoints" / "step-00001")
    first, _ = load_trained(pinned, str(tmp_path / "one"), print)
    gaps = (
        float((one - other).abs().max())
        for one, other in zip(loaded.model.parameters(), first.model.parameters(), strict=True)
    )
    assert max(gaps) < 1e-4


def test_the_other_modules_of_a_warm_start_stay_untrained(model: Path, tmp_path: Path) -> None:
    own = recipe(model, "sft.epochs=1", "training.learning_rate=0.05")
    learn(own, tmp_path / "one", teacher(tmp_path / "teacher"))
    overrides = ["agent.verifier.kind=llm", "agent.verifier.max_tokens=8", f"model.name={tmp_path / 'one'}"]
    warm = recipe(model, *overrides)
    trainer = SupervisedTrainer(
        warm,
        tmp_path / "two",
        Progress(io.StringIO()),
        [pick, note],
        [],
        select(Wanted((tmp_path / "teacher",)), warm, []),
        None,
    )
    plain, trained = load_named(own, str(model)).model, load_trained(own, str(tmp_path / "one"), print)[0].model
    assert trainer.frozen is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    for engine, expected in ((trainer.frozen, plain), (trainer.engine, trained)):
        assert torch.equal(engine.model.state_dict()[name], expected.state_dict()[name])
    assert not torch.equal(plain.state_dict()[name], trained.state_dict()[name])
    with trainer.policy.frozen() as reference:
        assert torch.equal(
            reference.state_dict()[name.replace(".weight", ".base_layer.weight")], trained.state_dict()[name]
        )
    trainer.close()


def test_at_most_so_many_of_one_question_the_shortest_first_and_never_a_held_out_one(
    model: Path, tmp_path: Path
) -> None:
    entries = [
        entry("one", act("pick", "a"), act("pick", "b"), DONE),
        entry("One ", act("note", "b b"), DONE),
        entry("one", act("pick", "b"), DONE),
        entry("one", act("pick", "c"), DONE),
        entry("two", act("pick", "z"), DONE),
        entry(HELD_OUT[0].question, act("pick", "b"), DONE),
        entry("two", act("pick", "b"), DONE, reward=0.0),
        entry("two", act("pick", "c"), DONE),
    ]
    run = record_run(tmp_path / "run", entries)
    said = io.StringIO()
    own = recipe(model, "sft.epochs=1")
    assert len(learn(own, tmp_path / "sft", Wanted((run,), per_question=2), said)) == 1
    lines = said.getvalue().splitlines()
    assert (
        "demonstrations: 3 of 8 trajectories kept, of 2 questions; left out: over --per-question 2, held out for "
        "evaluation 1, reward below 1 1, an action that the planner's grammar does not allow 1"
    ) in lines
    assert [line for line in lines if line.startswith("LEFT OUT")] == [
        "LEFT OUT: 1 trajectories ask questions of eval_tasks; who learns their answers cannot be evaluated on them"
    ]
    with Store(tmp_path / "sft" / "store.sqlite") as store:
        kept = store.trajectories(1, DEMONSTRATION)
    contexts = [one.trajectory.turns[0].action.context for one in kept if one.trajectory.turns[0].action]
    assert contexts == ["b", "c", "c"]


def test_nothing_is_left_of_a_run_that_cannot_start(model: Path, tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", [entry("q", act("pick", "z"), DONE), entry("q", act("pick", "b"), reward=0.0)])
    folder = tmp_path / "sft"
    with pytest.raises(UserError) as nothing:
        learn(recipe(model), folder, Wanted((run,)))
    assert str(nothing.value) == (
        "nothing to learn from: 0 of 2 trajectories kept, of 0 questions; left out: reward below 1 1, an action that "
        "the planner's grammar does not allow 1; name another run with --from, or set another --phase or --min-reward"
    )
    with pytest.raises(RecipeError) as slow:
        learn(recipe(model, "training.steps=9", "training.warmup_steps=2"), folder, teacher(tmp_path / "teacher"))
    assert str(slow.value) == (
        "training.warmup_steps = 2: the rate is reached in the step after them, and 5 demonstrations make 2 steps; set "
        "training.warmup_steps to at most 1"
    )
    with pytest.raises(UserError, match=f"--resume: {folder} does not exist"):
        learn(recipe(model), folder, None)
    assert not folder.exists()
