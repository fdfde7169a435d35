"""Atlas: questions about countries, each solvable with the built-in tools, in twelve kinds of one to three calls.

Invariant: the splits share no country and no capital (nor a name within another's, as Niger in Nigeria), and every
answer is computed from the numbers the tools give.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from midflight.tasks.base import Task
from midflight.tools.facts.world import ALIASES, CAPITAL_ALIASES, Country, countries
from midflight.tools.text import format_number

Split = Literal["train", "validation", "test"]

KINDS: Mapping[str, int] = MappingProxyType(
    {
        "capital": 1,
        "population": 1,
        "area": 1,
        "country_of_capital": 1,
        "arithmetic": 1,
        "population_of_capital": 2,
        "area_of_capital": 2,
        "density": 3,
        "sum": 3,
        "difference": 3,
        "ratio": 3,
        "larger_by": 3,
    }
)
"""Level by kind: how many tool calls an answer takes, `finish` not counted."""

_OF_A_CAPITAL = frozenset({"capital", "country_of_capital", "population_of_capital", "area_of_capital"})
_NAME = re.compile(r"[A-Z][A-Za-z.' -]{1,31}")
_WHOLE = {"relative_tolerance": 0.0, "absolute_tolerance": 0.5}
"""For whole numbers: a share of a large sum would let one of its terms alone count as right."""
_QUOTIENT = {"relative_tolerance": 1e-3}


def split_of(key: str) -> Split:
    """The split a key falls in, by its hash: about 50 % train, 15 % validation, 35 % test."""
    share = int.from_bytes(hashlib.sha256(f"atlas:{key}".encode()).digest()[:8], "big") / 2**64
    return "train" if share < 0.5 else "validation" if share < 0.65 else "test"


@cache
def atlas_countries(split: Split) -> tuple[Country, ...]:
    """The countries of a split, by ISO code: with people, 1 km2 or more, a capital no other has, and a plain name.

    Countries whose names or capitals contain one another share a split, that of the first of them.
    """
    known = list(countries().values())
    capitals = [country.capital for country in known]
    usable = [
        country
        for country in known
        if country.population > 0
        and country.area >= 1
        and country.capital
        and capitals.count(country.capital) == 1
        and _NAME.fullmatch(country.name)
    ]
    leader = {country.iso: country.iso for country in usable}
    for one in usable:
        for other in usable:
            if any(a in b for a in (one.name, one.capital) for b in (other.name, other.capital)):
                first, second = sorted((leader[one.iso], leader[other.iso]))
                leader = {iso: first if head == second else head for iso, head in leader.items()}
    return tuple(country for country in usable if split_of(leader[country.iso]) == split)


class AtlasSampler:
    """Draws questions of one split; the caller chooses the kind, so a curriculum can.

    Args:
        split: train, validation or test.
        seed: of `rng`, the sampler's own source for `draw` without one.
        kinds: a subset of `KINDS`; None is all.

    Raises:
        ValueError: unknown split or kind.
    """

    def __init__(self, split: Split, seed: int = 0, kinds: Sequence[str] | None = None) -> None:
        if split not in get_args(Split):
            raise ValueError(f"unknown split {split!r}; valid: {', '.join(get_args(Split))}")
        self.kinds = tuple(KINDS if kinds is None else kinds)
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; valid: {', '.join(KINDS)}")
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise ValueError("kinds must name at least one kind, each once")
        self.split = split
        self.rng = random.Random(f"atlas:{split}:{seed}")
        self._countries = atlas_countries(split)
        self._with_capital = tuple(country for country in self._countries if country.name not in country.capital)

    def draw(self, kind: str, rng: random.Random | None = None) -> Task:
        """One question of `kind`; draws may repeat.

        Raises:
            ValueError: `kind` is not one of the sampler's.
        """
        if kind not in self.kinds:
            raise ValueError(f"this sampler has no kind {kind!r}; valid: {', '.join(self.kinds)}")
        rng = rng or self.rng
        if kind == "arithmetic":
            return self._arithmetic(rng)
        if kind in _ONE_COUNTRY:
            return self._about(kind, rng.choice(self.pool(kind)))
        return self._pair(kind, rng)

    def pool(self, kind: str) -> tuple[Country, ...]:
        """The countries a question of `kind` can be about; a capital that holds its country's name gives it away."""
        if kind == "density":  # divided by 1 km2, a lookup alone would be the answer
            return tuple(country for country in self._countries if country.area > 1)
        return self._with_capital if kind in _OF_A_CAPITAL else self._countries

    def all_about(self, kind: str) -> list[Task]:
        """Every question of a kind that is about one country; empty for the other kinds."""
        return [self._about(kind, country) for country in self.pool(kind)] if kind in _ONE_COUNTRY else []

    def _task(self, kind: str, key: str, question: str, answer: str, checker: str, options: dict[str, Any]) -> Task:
        return Task(
            id=f"atlas/{self.split}/{kind}/{key}",
            question=question[0].upper() + question[1:],
            answer=answer,
            checker=checker,
            checker_options=dict(options),
            kind=kind,
            level=KINDS[kind],
        )

    def _about(self, kind: str, country: Country) -> Task:
        question, answer, checker, options = _ONE_COUNTRY[kind](country)
        return self._task(kind, country.iso, question, answer, checker, options)

    def _pair(self, kind: str, rng: random.Random) -> Task:
        quantity = rng.choice(("population", "area"))
        while True:
            one, other = rng.sample(self._countries, 2)
            first, second = getattr(one, quantity), getattr(other, quantity)
            if first != second and (kind != "ratio" or second > 1):
                break
        if kind == "difference" and first < second:
            one, other, first, second = other, one, second, first
        a, b, people = one.phrase, other.phrase, quantity == "population"
        question, value = {
            "sum": (
                f"How many people live in {a} and {b} together?"
                if people
                else f"What is the area of {a} and {b} together, in square kilometres?",
                first + second,
            ),
            "difference": (
                f"How many more people live in {a} than in {b}?"
                if people
                else f"By how many square kilometres is the area of {a} larger than that of {b}?",
                first - second,
            ),
            "ratio": (f"What is the {quantity} of {a} divided by the {quantity} of {b}?", first / second),
            "larger_by": (
                f"{a} or {b}: how many more people live in the more populous one?"
                if people
                else f"{a} or {b}: how much larger is the area of the larger one?",
                abs(first - second),
            ),
        }[kind]
        tolerance = _QUOTIENT if kind == "ratio" else _WHOLE
        return self._task(
            kind, f"{quantity}/{one.iso}-{other.iso}", question, format_number(value), "numeric", tolerance
        )

    def _arithmetic(self, rng: random.Random) -> Task:
        while True:
            a, b, c = rng.randint(12, 999), rng.randint(2, 99), rng.randint(2, 999)
            shape = rng.choice(("a + c", "a - c", "a * b", "a * b + c", "a * b - c", "a + c - b", "(a + c) * b"))
            expression = shape.replace("a", str(a)).replace("b", str(b)).replace("c", str(c))
            operands = sorted(int(number) for number in re.findall(r"[0-9]+", expression))
            if split_of(f"operands:{operands}") == self.split:
                break
        value = {
            "a + c": a + c,
            "a - c": a - c,
            "a * b": a * b,
            "a * b + c": a * b + c,
            "a * b - c": a * b - c,
            "a + c - b": a + c - b,
            "(a + c) * b": (a + c) * b,
        }[shape]
        key = expression.replace(" ", "")
        return self._task("arithmetic", key, f"What is {expression}?", str(value), "numeric", _WHOLE)


_Parts = tuple[str, str, str, dict[str, Any]]
"""Question, answer, checker, its options."""


def _name(question: str, answer: str, aliases: tuple[str, ...]) -> _Parts:
    return question, answer, "exact", {"aliases": list(aliases)} if aliases else {}


_DENSITY = ("What is the population density of {}?", "How many people live per square kilometre in {}?")
"""Half of the countries, by hash, are asked about in the one wording and half in the other."""

_ONE_COUNTRY: Mapping[str, Callable[[Country], _Parts]] = MappingProxyType(
    {
        "capital": lambda c: _name(f"What is the capital of {c.phrase}?", c.capital, CAPITAL_ALIASES.get(c.iso, ())),
        "population": lambda c: (f"How many people live in {c.phrase}?", str(c.population), "numeric", _WHOLE),
        "area": lambda c: (f"What is the area of {c.phrase} in square kilometres?", str(c.area), "numeric", _WHOLE),
        "country_of_capital": lambda c: _name(
            f"Which country has {c.capital} as its capital?", c.name, ALIASES.get(c.iso, ())
        ),
        "population_of_capital": lambda c: (
            f"How many people live in the country whose capital is {c.capital}?",
            str(c.population),
            "numeric",
            _WHOLE,
        ),
        "area_of_capital": lambda c: (
            f"What is the area in square kilometres of the country whose capital is {c.capital}?",
            str(c.area),
            "numeric",
            _WHOLE,
        ),
        "density": lambda c: (
            _DENSITY[split_of(f"wording:{c.iso}") == "train"].format(c.phrase),
            format_number(c.population / c.area),
            "numeric",
            _QUOTIENT,
        ),
    }
)


def atlas_tasks(split: Split, count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Task]:
    """`count` questions, kinds in turn; the same arguments give the same questions in the same order.

    A question repeats only when its kind has no other left; its id then ends in `#2`, `#3` and so on.

    Raises:
        ValueError: unknown split or kind, or a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    sampler = AtlasSampler(split, seed, kinds)
    rngs = {kind: random.Random(f"atlas:{split}:{seed}:{kind}") for kind in sampler.kinds}
    decks: dict[str, list[Task]] = {kind: [] for kind in sampler.kinds}
    times: dict[str, int] = {}
    tasks: list[Task] = []
    for index in range(count):
        kind = sampler.kinds[index % len(sampler.kinds)]
        task = _next(sampler, kind, rngs[kind], decks[kind], times)
        times[task.id] = times.get(task.id, 0) + 1
        tasks.append(task if times[task.id] == 1 else _again(task, times[task.id]))
    return tasks


def _next(sampler: AtlasSampler, kind: str, rng: random.Random, deck: list[Task], seen: Mapping[str, int]) -> Task:
    """From a shuffled deck where a kind can be listed, otherwise a draw that is new if a few tries find one."""
    if not deck:
        deck.extend(sampler.all_about(kind))
        rng.shuffle(deck)
    if deck:
        return deck.pop()
    for _ in range(100):
        task = sampler.draw(kind, rng)
        if task.id not in seen:
            break
    return task


def _again(task: Task, time: int) -> Task:
    return replace(task, id=f"{task.id}#{time}")
