"""The shipped recipes of tool use solve one real task each offline: real tools, a scripted engine for the models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midflight.agent import AgentFlow, Query, StopReason, Trajectory
from midflight.building import assemble, toolset_of
from midflight.engines.scripted import ScriptedEngine
from midflight.recipe import load_recipe
from midflight.rewards import score
from midflight.tasks import load_tasks
from midflight.tools import ErrorKind
from midflight.tools.chemistry.molecules import MEASURED_LOGP
from tests.sandbox.ready import need_bubblewrap

GO_ON = "Result: valid\nMemory: insufficient\nContradictions: none\nReason: more is needed\n"
STOP = "Result: valid\nMemory: sufficient\nContradictions: none\nReason: all is known\n"


def act(tool: str, context: str = "") -> str:
    return f"Sub-goal: get on\nTool: {tool}\n" + (f"Context: {context}" if tool != "finish" else "")


def turn(tool: str, verdict: str = GO_ON, **arguments: object) -> list[str]:
    """What planner, executor and verifier say in one turn."""
    return [act(tool, str(arguments)), json.dumps(arguments), verdict]


def flow_of(name: str, script: list[str]) -> tuple[AgentFlow, ScriptedEngine]:
    recipe = load_recipe(name)
    engine = ScriptedEngine(script)
    toolset = toolset_of(recipe, engine=lambda _: engine)
    return assemble(recipe, toolset, engine, engine, training=False), engine


def solve(name: str, task_id: str, script: list[str]) -> tuple[Trajectory, float]:
    recipe = load_recipe(name)
    assert recipe.eval_tasks is not None
    (task,) = [task for task in load_tasks(recipe.eval_tasks.family) if task.id == task_id]
    flow, engine = flow_of(name, script)
    trajectory = asyncio.run(flow.run(Query(task.question)))
    assert len(engine.requests) == len(script)
    assert trajectory.answer is not None
    return trajectory, score(task, trajectory.answer.text)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_research_answers_from_a_folder_of_documents() -> None:
    pytest.importorskip("trafilatura")
    claim = "Grebe Island counted 1,611 puffins in 2024."
    source = "Puffins counted on Grebe Island: 1,530 in 2022, 1,498 in 2023, 1,611 in 2024."
    trajectory, reward = solve(
        "research",
        "puffins-2024",
        [
            *turn("corpus_search", query="puffins counted in 2024"),
            act("verify_claim", claim),
            json.dumps({"claim": claim, "source": source}),
            "supported 1",  # the model inside the tool
            GO_ON,
            *turn("calculator", STOP, expression="455 + 1611 + 144"),
            "Answer: 2210 [turn 1] [turn 3]",
        ],
    )
    searched, verified, summed = (turn.result for turn in trajectory.turns)
    for counted in ("455 in 2024", "1,611 in 2024", "144 in 2024"):
        assert counted in searched.text
    assert {line for line in searched.text.splitlines() if line.startswith("[")} >= {
        "[stations/heron-point.md]",
        "[stations/grebe-island.html] Grebe Island station",
        "[stations/auk-rock.txt]",
    }
    assert verified.text == f"supported\n{source}"
    assert summed.text == "2210" and trajectory.stop_reason is StopReason.VERIFIED
    assert reward == 1.0


def test_chemistry_judges_a_molecule() -> None:
    pytest.importorskip("rdkit")
    smiles = "CC(C)Cc1ccc(cc1)C(C)C(=O)O"
    trajectory, reward = solve(
        "chemistry",
        "error-ibuprofen",
        [
            *turn("predict_logp", smiles=smiles),
            *turn("compare_to_known", smiles=smiles),
            *turn("calculator", expression="3.97 - 3.0732"),
            act("finish"),
            "Answer: 0.8968 [turn 3]",
        ],
    )
    estimated, known, difference = (turn.result.text for turn in trajectory.turns[:3])
    assert (estimated, difference) == ("3.0732", "0.8968")
    assert known.splitlines()[1] == f"1.000 (the same molecule) | ibuprofen | 3.97 | {smiles}"
    assert trajectory.stop_reason is StopReason.FINISHED and reward == 1.0


def test_coding_mends_a_failing_test() -> None:
    need_bubblewrap()
    project = Path(str(load_recipe("coding").agent.sandbox.files))
    broken = (project / "shifts.py").read_text()
    mended = broken.replace("return end - start", "return (end - start) % (24 * 60)")
    trajectory, reward = solve(
        "coding",
        "shifts",
        [
            *turn("run_tests", path="test_shifts.py"),
            *turn("read_file", path="shifts.py"),
            *turn("write_file", path="shifts.py", content=mended),
            *turn("run_tests", STOP, path="test_shifts.py"),
            "Answer: 3 [turn 4]",
        ],
    )
    before, read, _, after = (turn.result for turn in trajectory.turns)
    assert before.text.splitlines()[0] == "1 passed, 2 failed" and before.error is ErrorKind.TOOL_ERROR
    assert read.text == broken
    assert (after.text.splitlines()[0], after.error) == ("3 passed", None)
    assert trajectory.stop_reason is StopReason.VERIFIED and reward == 1.0
    assert (project / "shifts.py").read_text() == broken  # the workspace was the trajectory's own


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_answers_of_the_chemistry_questions_are_those_of_the_tools(split: str) -> None:
    pytest.importorskip("rdkit")
    from midflight.tools.chemistry.molecules import logp, nearest, properties

    tasks = load_tasks(str(Path(load_recipe("chemistry").train_tasks.family).with_name(f"{split}.jsonl")))
    assert len(tasks) >= 4
    for task in tasks:
        (smiles,) = [word for word in task.question.replace("?", "").split() if any(mark in word for mark in "()=[")]
        found = dict(line.split(": ") for line in properties(smiles).splitlines())
        measured = nearest(smiles, str(MEASURED_LOGP), 1).splitlines()[1].split(" | ")
        value = {
            "weight": found["molecular weight"].split()[0],
            "logp": str(logp(smiles)),
            "rule": found["rule of five violations"],
            "surface": found["topological polar surface"].split()[0],
            "error": f"{abs(logp(smiles) - float(measured[2])):.4f}",
        }[task.id.partition("-")[0]]
        assert score(task, value) == 1.0, (task.id, value)
        assert not task.id.startswith("error") or "the same molecule" in measured[0]
