"""Which worked examples a question is shown."""

import re
from pathlib import Path

import pytest

from midflight.agent import LLMPlanner, Memory, Query
from midflight.agent.examples import Examples
from midflight.engines.scripted import ScriptedEngine
from midflight.tasks.atlas import KINDS, atlas_countries, atlas_tasks
from midflight.tools.base import Toolset
from tests.agent.doubles import population

TEXT = """\
Question: How many people live in Chile?
Turn 1: population: Chile

Question: What is 3 * 4?
Turn 1: calculator: 3 * 4


Question: What is the area of Chile?
Turn 1: area: Chile
"""
SHIPPED = Path(__file__).parents[2] / "recipes" / "examples" / "atlas.txt"


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("How many live in Peru?", "How many"),
        ("What is 90 * 7?", "What is 3"),
        ("The area of Peru?", "What is the area"),
    ],
)
def test_the_nearest_example_comes_last(question: str, first: str) -> None:
    examples = Examples(TEXT)
    assert len(examples.blocks) == 3
    assert examples.nearest(question, 1).startswith(f"Question: {first}")
    assert examples.nearest(question, 2).endswith(examples.nearest(question, 1))
    assert {block in examples.nearest(question, 3) for block in examples.blocks} == {True}


def test_an_example_may_hold_empty_lines() -> None:
    assert Examples("Question: a\nTurn 1\n\nTurn 2\n\nQuestion: b\nTurn 1\n").blocks == [
        "Question: a\nTurn 1\n\nTurn 2\n",
        "Question: b\nTurn 1\n",
    ]


def test_a_question_like_none_gets_the_first_of_the_file() -> None:
    assert Examples(TEXT).nearest("¿Qué", 1) == "Question: How many people live in Chile?\nTurn 1: population: Chile\n"


def test_the_prompt_holds_the_nearest_only() -> None:
    planner = LLMPlanner(ScriptedEngine([]), format="compact", examples=TEXT, nearest_examples=1)
    system, _ = planner.messages(Query("What is 5 * 6?"), Toolset([population()]), Memory(), 4, "")
    assert system.parts[1] == "Question: What is 3 * 4?\nTurn 1: calculator: 3 * 4\n"


def test_shipped_examples_tell_no_held_out_country() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    for split in ("validation", "test"):
        for country in atlas_countries(split):  # type: ignore[arg-type]
            assert country.name not in text and country.capital not in text
    assert len(Examples(text).blocks) == 17
    asked = {task.question for kind in KINDS for task in atlas_tasks("test", 204, 0, [kind])}
    assert not any(question in text for question in asked)


def test_the_plain_examples_are_the_shipped_ones_with_results_in_place_of_references() -> None:
    blocks = []
    for block in Examples(SHIPPED.read_text(encoding="utf-8")).blocks:
        results = re.findall(r"^Result: (.*)$", block, re.MULTILINE)
        blocks.append(re.sub(r"#(\d)", lambda found, results=results: results[int(found[1]) - 1], block))
    assert SHIPPED.with_name("atlas-plain.txt").read_text(encoding="utf-8") == "\n".join(blocks)
