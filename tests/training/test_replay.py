"""Trajectories that somebody else made, as the planner would have met and written them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from midflight.agent.actions import render_action
from midflight.engines.local.grammar import GrammarError
from midflight.progress import Progress
from midflight.store import Store
from midflight.tasks.base import Task
from midflight.training.replay import NotShowable, replay
from midflight.training.trainer import train
from tests.training.recorded import act, trajectory
from tests.training.test_sft import DONE, note, pick, ready, recipe, shown

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_plots")]

FORMATS = [
    ("agent.planner.format=compact", "agent.planner.max_tokens=12", "agent.grounded=true"),
    ("agent.planner.format=full", "agent.planner.max_tokens=64", "model.chat_template=true"),
]


@pytest.mark.parametrize("overrides", FORMATS, ids=["compact", "full"])
def test_a_replay_of_the_planners_own_rollouts_is_what_was_recorded(
    subwords: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    few = ["training.steps=1", "training.queries_per_step=3", "agent.planner.temperature=0.7"]
    own = recipe(subwords, *overrides, *few)
    tasks = [Task(str(number), f"Pick a, b or c, number {number}.", "a") for number in range(3)]
    train(own, tmp_path / "run", progress=Progress(io.StringIO()), tools=[pick, note], tasks=tasks)
    with Store(tmp_path / "run" / "store.sqlite") as store:
        records = store.trajectories(1, "train", 1)
    flow, engine = ready(own)
    respelt, rows = 0, 0
    for record in records:
        if any(turn.action is None for turn in record.trajectory.turns):
            continue  # cut off by max_tokens
        found = replay(record.task, record.trajectory, flow, engine)
        for row, turn in zip(found.rows, found.trajectory.turns, strict=True):
            drawn = turn.generation
            assert (row.prompt_ids, row.ids, row.forced) == (drawn.prompt_ids, drawn.ids, drawn.forced)
            assert (row.temperature, row.grammar) == (1.0, drawn.grammar)
            assert {type(one) for one in row.forced} == {bool}
            respelt += row.ids != tuple(engine.encode_text(drawn.text))
            rows += 1
    assert rows > 20 and respelt > 5  # the tokenizer would have spelt many of the drawn texts otherwise


def test_what_others_did_is_shown_as_the_planner_would_meet_and_write_it(subwords: Path) -> None:
    recorded = trajectory("Pick one.", act("pick", "b", "try"), "I would say c", act("note", "two words"), DONE)
    flow, engine = ready(recipe(subwords, max_turns=4))
    found = replay(Task("t", "Pick one.", "x"), recorded, flow, engine)
    assert [turn.index for turn in found.trajectory.turns] == [1, 3, 4]
    assert found.length == (3, sum(len(row.ids) for row in found.rows))
    texts = [engine.tokenizer.decode(row.ids) for row in found.rows]
    assert texts == [" pick: b\n", " note: two words\n", " finish\n"]
    assert [row.ids for row in found.rows] == [tuple(engine.encode_text(text)) for text in texts]
    asked = engine.tokenizer.decode(found.rows[1].prompt_ids)
    assert asked.endswith(
        "Question: Pick one.\nTurn 1: pick: b\nResult: b\nTurn 2: I would say c\n"
        "Error: invalid_action: expected an action\nTurn 3:"
    )
    assert engine.tokenizer.decode(found.rows[2].prompt_ids).endswith("Turn 4 (last turn):")
    assert found.rows[0].forced[-1] and not all(found.rows[0].forced)  # behind one letter only the line can end

    grammar, ids = found.rows[0].grammar, found.rows[0].ids
    assert grammar is not None and engine.masks.forced(grammar, ids) == found.rows[0].forced
    for wrong in (ids[:-1], (*ids, ids[-1]), ids[::-1]):
        with pytest.raises(GrammarError):
            engine.masks.forced(grammar, wrong)

    full = recipe(subwords, "agent.planner.format=full", "agent.planner.max_tokens=64")
    free = recipe(subwords, "agent.planner.format=full", "agent.planner.max_tokens=64", "agent.planner.grammar=false")
    said = trajectory("Pick one.", act("note", "one\ntwo", "try"), act("finish", "", "done"))
    with pytest.raises(NotShowable, match="an action that the planner's grammar does not allow"):
        shown(full, said)  # its grammar holds a context to one line
    flow, engine = ready(free)
    first, last = replay(Task("t", "Pick one.", "x"), said, flow, engine).rows
    assert engine.tokenizer.decode(last.ids) == f"Sub-goal: done\nTool: finish\n{engine.tokenizer.eos_token}"
    assert (first.grammar, set(first.forced)) == (None, {False})


@pytest.mark.parametrize("token", [257, 70_000, -1])
def test_recorded_ids_that_the_model_lacks_are_not_shown(token: int, model: Path) -> None:
    for overrides in ((), ("agent.planner.grammar=false",)):
        flow, engine = ready(recipe(model, *overrides))
        task, drawn = Task("t", "Pick one.", "x"), trajectory("Pick one.", DONE)
        (row,) = replay(task, drawn, flow, engine).rows
        (turn,) = drawn.turns
        text = render_action(DONE, flow.planner.format)
        generation = replace(
            turn.generation, prompt_ids=row.prompt_ids, text=text, grammar=row.grammar, ids=(*row.ids[:-1], token)
        )
        damaged = replace(drawn, turns=(replace(turn, generation=generation),))
        with pytest.raises(NotShowable) as caught:
            replay(task, damaged, flow, engine)
        assert str(caught.value) == "token ids that the model lacks"


def test_what_the_planner_could_not_have_done_is_not_shown(model: Path) -> None:
    cases = [
        ((), (act("other", "b"), DONE), "a tool that agent.tools lacks"),
        ((), (act("pick", "d"), DONE), "an action that the planner's grammar does not allow"),
        ((), (act("note", "x\ny"), DONE), "not in the format compact: a field that is empty, or has line breaks"),
        ((), (act("note", "a long line " * 6), DONE), "an action over agent.planner.max_tokens"),
        ((), (act("pick", "a"),) * 4, "more turns than agent.max_turns"),
        ((), ("nonsense", "and more"), "nothing that was a choice"),
        (("agent.query_analysis=true",), (DONE,), "no query analysis"),
        (("agent.planner.format=full", "agent.planner.max_tokens=96"), (DONE,), "not in the format full: no sub-goal"),
        (
            ("model.context_length=300", "agent.memory_tokens=150"),
            (act("note", "word " * 5), DONE),
            "over model.context_length",
        ),
        (("agent.memory_tokens=80",), (act("note", "word " * 5),) * 3, "over agent.memory_tokens"),
    ]
    for overrides, said, reason in cases:
        settings = recipe(model, "agent.planner.max_tokens=64", *overrides)
        with pytest.raises(NotShowable) as caught:
            shown(settings, trajectory("Pick one. " * 4, *said))
        assert str(caught.value).startswith(reason)
