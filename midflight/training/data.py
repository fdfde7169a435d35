"""Where training questions come from: a generated family, or a list in passes; a curriculum weighs their kinds.

Invariant: what step s draws depends only on the seed, s, the draw's number in the step and the curriculum's state. So
passes are kept by counting: a kind has had its share of all that could be drawn so far. They are whole while shares
stay the same and every step draws all it may; one draw has no question twice before it has all of the kind.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from midflight.recipe.config import CurriculumConfig
from midflight.seeds import derive
from midflight.tasks.atlas import AtlasSampler
from midflight.tasks.base import Task


class Source(Protocol):
    """Draws one question of a kind."""

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def draw(self, kind: str, rng: random.Random, number: int) -> Task:
        """`number` counts what was drawn of the kind before."""
        ...


class ListSource:
    """Questions from a list; each kind over and over, in one order that `seed` shuffles."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._by_kind: dict[str, list[Task]] = {}
        for task in random.Random(derive(seed, "order")).sample(tasks, len(tasks)):
            self._by_kind.setdefault(task.kind, []).append(task)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._by_kind)

    def draw(self, kind: str, rng: random.Random, number: int) -> Task:
        tasks = self._by_kind[kind]
        return tasks[number % len(tasks)]


class _Generated:
    """The built-in family: every draw is new, by the randomness that it gets."""

    def __init__(self, sampler: AtlasSampler) -> None:
        self._sampler = sampler

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._sampler.kinds

    def draw(self, kind: str, rng: random.Random, number: int) -> Task:
        return self._sampler.draw(kind, rng)


def atlas_source(split: str, kinds: Sequence[str] | None) -> Source:
    """The built-in family as a source."""
    return _Generated(AtlasSampler(split, 0, kinds))  # type: ignore[arg-type]


@dataclass
class TaskStream:
    """Draws the questions of each step. `success` is the running success rate of each kind, the curriculum's state.

    `most` is how many a step may draw, with all refills.
    """

    source: Source
    seed: int
    curriculum: CurriculumConfig | None
    most: int
    success: dict[str, float] = field(default_factory=dict)

    def weights(self) -> dict[str, float]:
        """How likely each kind is drawn, unnormalised; a kind not seen yet counts as p = 0.5."""
        if self.curriculum is None:
            return {kind: 1.0 for kind in self.source.kinds}
        rates = {kind: self.success.get(kind, 0.5) for kind in self.source.kinds}
        return {kind: self.curriculum.floor + 1 - p for kind, p in rates.items()}

    def draw(self, step: int, start: int, count: int) -> list[Task]:
        """`count` questions for step `step`, the first being draw number `start` of it.

        Kinds are drawn by low-discrepancy (one uniform shift, equal spacing), so a step's mix is close to the weights.
        """
        weights = self.weights()
        total = sum(weights.values())
        rng = random.Random(derive(self.seed, "tasks", step, start))
        shift = rng.random()
        before = (step - 1) * self.most + start
        drawn: Counter[str] = Counter()
        tasks = []
        for index in range(count):
            kind = _at(weights, (index + shift) / count * total)
            tasks.append(self.source.draw(kind, rng, int(before * weights[kind] / total) + drawn[kind]))
            drawn[kind] += 1
        rng.shuffle(tasks)
        return tasks

    def update(self, rewards_by_kind: Mapping[str, Sequence[float]]) -> None:
        """Move the running success rates by the step's rewards."""
        decay = self.curriculum.decay if self.curriculum is not None else 0.0
        for kind, rewards in rewards_by_kind.items():
            mean = sum(rewards) / len(rewards)
            old = self.success.get(kind)
            self.success[kind] = mean if old is None else decay * old + (1 - decay) * mean


def _at(weights: Mapping[str, float], aim: float) -> str:
    """The key whose share of the summed weights holds `aim`."""
    for key, weight in weights.items():
        aim -= weight
        if aim < 0:
            return key
    return next(reversed(list(weights)))
