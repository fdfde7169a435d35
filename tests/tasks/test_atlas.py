"""Atlas: disjoint splits, seeds, and every question solved by calling the tools."""

import asyncio
import random
import re
from itertools import combinations
from typing import cast

import pytest

from midflight.rewards import score
from midflight.tasks import AtlasSampler, Task, atlas_tasks
from midflight.tasks.atlas import KINDS, Split, atlas_countries
from midflight.tools import Toolset, make_toolset
from midflight.tools.facts.world import countries

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def test_every_kind_has_its_wording_and_answer() -> None:
    sampler = AtlasSampler("validation")
    about = {kind: {task.id: task for task in sampler.all_about(kind)} for kind in KINDS}

    def peru(kind: str) -> tuple[str, str]:
        task = about[kind][f"atlas/validation/{kind}/PE"]
        assert (task.kind, task.level) == (kind, KINDS[kind])
        return task.question, task.answer

    assert peru("capital") == ("What is the capital of Peru?", "Lima")
    assert peru("population") == ("How many people live in Peru?", "31989256")
    assert peru("area") == ("What is the area of Peru in square kilometres?", "1285220")
    assert peru("country_of_capital") == ("Which country has Lima as its capital?", "Peru")
    assert peru("population_of_capital") == ("How many people live in the country whose capital is Lima?", "31989256")
    assert peru("area_of_capital") == (
        "What is the area in square kilometres of the country whose capital is Lima?",
        "1285220",
    )
    assert peru("density") == ("What is the population density of Peru?", "24.89010131")
    other = about["density"]["atlas/validation/density/AD"]
    assert other.question == "How many people live per square kilometre in Andorra?"
    wordings = [task.question.startswith("What") for task in about["density"].values()]
    assert (sum(wordings), len(wordings)) == (12, 37)
    netherlands = about["capital"]["atlas/validation/capital/NL"]
    assert netherlands.question == "What is the capital of the Netherlands?"
    assert [level for level in KINDS.values()] == [1] * 5 + [2] * 2 + [3] * 5


def test_splits_share_no_country_and_no_capital() -> None:
    parts = {split: atlas_countries(split) for split in SPLITS}
    assert {split: len(part) for split, part in parts.items()} == {"train": 128, "validation": 37, "test": 75}
    for one, other in combinations(SPLITS, 2):
        names = {name for country in parts[one] for name in (country.name, country.capital)}
        others = {name for country in parts[other] for name in (country.name, country.capital)}
        assert not [(a, b) for a in names for b in others if a in b or b in a]


@pytest.mark.parametrize("split", SPLITS)
def test_a_question_names_only_countries_of_its_split(split: Split) -> None:
    own = {country.iso for country in atlas_countries(split)}
    used = {c.iso: c for part in SPLITS for c in atlas_countries(part)}
    foreign = [name for iso, c in used.items() if iso not in own for name in (c.name, c.capital)]
    pattern = re.compile("|".join(rf"\b{re.escape(name)}(?!\w)" for name in foreign))
    tasks = atlas_tasks(split, 5000, seed=11)
    assert {task.kind for task in tasks} == set(KINDS)
    assert [task.question for task in tasks if pattern.search(task.question)] == []


def test_arithmetic_operands_are_disjoint() -> None:
    def operands(split: Split) -> set[tuple[str, ...]]:
        tasks = atlas_tasks(split, 3000, seed=1, kinds=["arithmetic"])
        return {tuple(sorted(re.findall("[0-9]+", task.question))) for task in tasks}

    train, test = operands("train"), operands("test")
    assert len(train) > 2500
    assert not train & test


def test_same_seed_same_questions() -> None:
    assert atlas_tasks("test", 240, seed=5) == atlas_tasks("test", 240, seed=5)
    assert atlas_tasks("test", 240, seed=5) != atlas_tasks("test", 240, seed=6)
    assert atlas_tasks("train", 60, seed=5) == atlas_tasks("train", 240, seed=5)[:60]
    # Fixed by value too, so that a change of the draw is seen.
    assert [task.id for task in atlas_tasks("train", 5, seed=0)] == [
        "atlas/train/capital/JO",
        "atlas/train/population/KI",
        "atlas/train/area/BN",
        "atlas/train/country_of_capital/VU",
        "atlas/train/arithmetic/206*97+615",
    ]


def test_draws_are_balanced_and_distinct() -> None:
    tasks = atlas_tasks("test", 240, seed=0)
    assert {kind: sum(task.kind == kind for task in tasks) for kind in KINDS} == dict.fromkeys(KINDS, 20)
    assert len({task.question for task in tasks}) == 240
    pool = len(AtlasSampler("test").pool("capital"))
    many = atlas_tasks("test", pool + 3, seed=0, kinds=["capital"])
    assert len({task.question for task in many}) == pool
    assert len({task.id for task in many}) == pool + 3
    assert [task.id.endswith("#2") for task in many[-4:]] == [False, True, True, True]


def test_sampler_draws_the_kind_that_is_asked_for() -> None:
    sampler = AtlasSampler("train", seed=2, kinds=["sum", "capital"])
    drawn = [sampler.draw("sum") for _ in range(20)]
    assert {task.kind for task in drawn} == {"sum"}
    assert [AtlasSampler("train", 2, ["sum"]).draw("sum") for _ in range(1)] == drawn[:1]
    assert sampler.draw("sum", random.Random(7)) == sampler.draw("sum", random.Random(7))
    with pytest.raises(ValueError, match="no kind 'area'"):
        sampler.draw("area")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="unknown kind 'product'"):
        AtlasSampler("train", kinds=["product"])
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        AtlasSampler("dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one kind"):
        AtlasSampler("train", kinds=[])
    with pytest.raises(ValueError, match="count must be at least 1"):
        atlas_tasks("train", 0, seed=0)


def _use(tools: Toolset, calls: list[str], name: str, argument: str) -> str:
    found = tools.get(name)
    assert found is not None
    arguments = {next(iter(found.parameters["properties"])): argument}
    assert tools.validate(name, arguments) is None
    result = asyncio.run(found.call(arguments, 5.0))
    assert result.error is None, (name, argument, result)
    calls.append(name)
    return result.text


def _solve(task: Task, tools: Toolset) -> tuple[str, int]:
    """Answer from the question's words and the tools alone; also the number of calls."""
    calls: list[str] = []

    def use(name: str, argument: str) -> str:
        return _use(tools, calls, name, argument)

    question = task.question
    if task.kind == "arithmetic":
        answer = use("calculator", question.removeprefix("What is ").removesuffix("?"))
    elif task.kind in ("population_of_capital", "area_of_capital"):
        city = question.split("whose capital is ")[1].removesuffix("?")
        answer = use(task.kind.removesuffix("_of_capital"), use("country_of_capital", city))
    elif task.kind == "country_of_capital":
        answer = use("country_of_capital", question.removeprefix("Which country has ").removesuffix(" as its capital?"))
    elif task.kind in ("capital", "population", "area", "density"):
        rest = re.split(r"(?: of| in) (?!square)", question, maxsplit=1)[1]
        name = rest.removesuffix("?").removesuffix(" in square kilometres")
        if task.kind == "density":
            answer = use("calculator", f"{use('population', name)} / {use('area', name)}")
        else:
            answer = use(task.kind, name)
    else:
        split = cast(Split, task.id.split("/")[1])
        quantity = "population" if "people" in question or "population" in question else "area"
        named = [c for c in atlas_countries(split) if re.search(rf"\b{re.escape(c.name)}(?!\w)", question)]
        spans = {c.name: question.index(c.name) for c in named}
        names = [
            n for n in spans if not any(n != m and n in m and question.count(n) == question.count(m) for m in spans)
        ]
        names.sort(key=lambda name: spans[name])
        assert len(names) == 2, (question, names)
        one, other = (use(quantity, name) for name in names)
        sign = {"sum": "+", "difference": "-", "ratio": "/", "larger_by": "-"}[task.kind]
        answer = use(
            "calculator", f"abs({one} {sign} {other})" if task.kind == "larger_by" else f"{one} {sign} {other}"
        )
    return answer, len(calls)


@pytest.mark.parametrize("split", SPLITS)
def test_a_reference_program_solves_every_question_with_the_tools(split: Split) -> None:
    tools = make_toolset(["capital", "population", "area", "country_of_capital", "calculator"])
    for task in atlas_tasks(split, 504, seed=9):
        answer, calls = _solve(task, tools)
        assert score(task, answer) == 1.0, (task, answer)
        assert calls == task.level, task


def test_wrong_answers_score_nothing() -> None:
    tasks = atlas_tasks("test", 240, seed=0)
    for task, other in zip(tasks, tasks[12:], strict=False):
        if other.kind in ("capital", "country_of_capital"):
            assert score(task, other.answer) == 0.0


def test_countries_left_out_have_a_reason() -> None:
    used = {country.iso for split in SPLITS for country in atlas_countries(split)}
    assert set(countries()) - used == {"AQ", "BQ", "BV", "GS", "HM", "JM", "NF", "TK", "UM", "VA"}


def test_no_term_of_a_question_is_its_answer() -> None:
    """Stopping after a lookup is never right, however unlike in size the two countries are."""
    by_iso = {country.iso: country for country in countries().values()}
    for split in ("train", "validation", "test"):
        sampler = AtlasSampler(split, 0, ("sum", "difference", "larger_by", "ratio"))
        for kind in sampler.kinds:
            for _ in range(500):
                task = sampler.draw(kind)
                quantity, _, pair = task.id.split("/", 3)[3].partition("/")
                for iso in pair.split("-"):
                    assert score(task, str(getattr(by_iso[iso], quantity))) == 0.0, task
