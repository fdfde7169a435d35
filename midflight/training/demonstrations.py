"""Which recorded trajectories a planner learns from by imitation: what runs hold, less what may not count.

Invariant: a question that the recipe holds out is never among them, whatever run or phase it comes from.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from midflight.agent.actions import refers
from midflight.errors import UserError, reading
from midflight.recipe import Recipe, RecipeError, resolved
from midflight.store import RunFolder, Store, TrajectoryRecord
from midflight.tasks.base import Task

PHASES = ("train", "before", "after", "interrupted")
"""What a run's trajectories were made for."""
DEMONSTRATION = "demonstration"
"""Phase of the copies that a supervised run keeps in its own store."""
HELD_OUT = "held out for evaluation"


@dataclass(frozen=True)
class Wanted:
    """Which trajectories of the runs `sources` to take.

    Raises:
        UserError: it can mean nothing; one line with what to do.
    """

    sources: tuple[Path, ...]
    phase: str = "train"
    """One of `PHASES`, or `all`."""
    min_reward: float = 1.0
    per_question: int | None = None
    """At most so many of one question, the shortest first; None takes all."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("--from: missing; name a run whose trajectories to learn from")
        folders = [os.path.abspath(source) for source in self.sources]
        for source, folder in zip(self.sources, folders, strict=True):
            if folders.count(folder) > 1:
                raise UserError(f"--from {source}: the same run is named twice; remove one")
        if self.phase not in (*PHASES, "all"):
            raise UserError(f"--phase {self.phase}: unknown; give {', '.join(PHASES)} or all")
        if not math.isfinite(self.min_reward):
            raise UserError(f"--min-reward {self.min_reward}: must be a finite number")
        if self.per_question is not None and self.per_question < 1:
            raise UserError(f"--per-question {self.per_question}: must be 1 or more; leave it out to take all")


@dataclass(frozen=True)
class Selection:
    """Trajectories to learn from, and how many were left out, by reason."""

    records: tuple[TrajectoryRecord, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    def without(self, reasons: Iterable[str | None]) -> Selection:
        """The selection less the records that have a reason to be left out, record by record.

        Raises:
            UserError: nothing is left.
        """
        pairs = list(zip(self.records, reasons, strict=True))
        more = Counter(reason for _, reason in pairs if reason is not None)
        left = Selection(tuple(record for record, reason in pairs if reason is None), self.left_out + more)
        if not left.records:
            raise UserError(
                f"nothing to learn from: {left.line()}; name another run with --from, or set another --phase or "
                "--min-reward"
            )
        return left

    def at_most(self, per_question: int | None) -> int:
        """How many of the records can be shown, where so many of one question are (None: all)."""
        questions = Counter(same_question(record.task.question) for record in self.records)
        return sum(count if per_question is None else min(count, per_question) for count in questions.values())

    def line(self) -> str:
        """What is kept, and what is left out by reason."""
        questions = len({same_question(record.task.question) for record in self.records})
        total = len(self.records) + self.left_out.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.left_out.most_common())
        return (
            f"{len(self.records)} of {total} trajectories kept, of {questions} questions; left out: {reasons or 'none'}"
        )


def same_question(text: str) -> str:
    """What texts that ask the same share: letter case and spacing do not count."""
    return " ".join(text.split()).casefold()


def _check_settings(recipe: Recipe) -> None:
    """Refuse what imitation has no meaning for."""
    if recipe.training.kl_beta > 0 and recipe.training.kl_in == "reward":
        raise RecipeError(
            "training.kl_in = reward: demonstrations have no reward to take it off; set training.kl_in=loss or "
            "training.kl_beta=0"
        )


def select(wanted: Wanted, recipe: Recipe, held_out: Sequence[Task]) -> Selection:
    """What the runs hold that is good enough and not held out; what the planner can write of it is not looked at.

    Raises:
        UserError: a run cannot be read, does not go with the recipe, or has nothing to learn from.
    """
    _check_settings(recipe)
    records = [record for source in wanted.sources for record in _read(source, wanted.phase, recipe)]
    forbidden = {same_question(task.question) for task in held_out}
    return Selection(tuple(records)).without(_reason(one, wanted.min_reward, forbidden) for one in records)


def _reason(record: TrajectoryRecord, min_reward: float, forbidden: set[str]) -> str | None:
    if {same_question(text) for text in (record.trajectory.query.text, record.task.question)} & forbidden:
        return HELD_OUT
    if record.reward is None:
        return "without a reward"
    return f"reward below {min_reward:g}" if record.reward < min_reward else None


def _read(source: Path, phase: str, recipe: Recipe) -> list[TrajectoryRecord]:
    """The trajectories of one run, whose contexts mean to the recipe's executor what they meant to its own."""
    key = f"--from {source}"
    file = RunFolder(source).store
    if not source.is_dir():
        raise UserError(f"{key}: no such folder; name a run")
    if not file.is_file():
        raise UserError(f"{key}: holds no {file.name}, so no run; name a run")
    with Store(file) as store:
        runs = store.runs()
        if not runs:
            raise UserError(f"{key}: its store holds no run; name another run")
        records = store.trajectories(runs[-1].id)
    with reading(file, "name another run"):
        agent = runs[-1].recipe["agent"]
        executor, grounded = str(agent["executor"]["kind"]), bool(agent["grounded"])
    found = [one for one in records if one.phase == phase or (phase == "all" and one.phase in PHASES)]
    if not found:
        there = ", ".join(f"{count} {name}" for name, count in Counter(one.phase for one in records).items())
        raise UserError(f"{key}: no trajectories of phase {phase}; it has {there or 'none'}; set another --phase")
    if all(one.reward is None for one in found):
        raise UserError(f"{key}: none of its {len(found)} trajectories has a reward; name another run")
    if executor != recipe.agent.executor.kind:
        raise RecipeError(
            f"agent.executor.kind = {recipe.agent.executor.kind}: the planner of {key} wrote for the kind {executor}; "
            f"set agent.executor.kind={executor} or name another run"
        )
    actions = (turn.action for record in found for turn in record.trajectory.turns)
    named = any(action is not None and refers(action.context) for action in actions)
    if named and grounded and not recipe.agent.grounded:
        raise RecipeError(
            f"agent.grounded = false: the planner of {key} names results as #n; set agent.grounded=true or name "
            "another run"
        )
    return found


def keep(folder: RunFolder, recipe: Recipe, wanted: Wanted, selection: Selection) -> None:
    """Begin a supervised run: its store gets copies of the demonstrations, so it needs no other run from then on."""
    folder.create()
    with Store(folder.store) as store:
        run_id = store.start_run(recipe.name, resolved(recipe), recipe.seed)
        store.add_trajectories(
            run_id, [replace(one, phase=DEMONSTRATION, step=None, advantage=None) for one in selection.records]
        )
    folder.inputs.mkdir(exist_ok=True)
    origin = {**asdict(wanted), "sources": [os.path.abspath(source) for source in wanted.sources]}
    aside = folder.inputs / ".demonstrations.json"
    aside.write_text(json.dumps({**origin, "kept": len(selection.records), "left_out": selection.left_out}, indent=2))
    os.replace(aside, folder.demonstrations)


def kept(folder: RunFolder) -> Selection:
    """What `keep` wrote.

    Raises:
        UserError: the store is damaged, or gone.
    """
    records: list[TrajectoryRecord] = []
    if folder.store.is_file():
        with Store(folder.store) as store:
            records = [one for run in store.runs()[-1:] for one in store.trajectories(run.id, DEMONSTRATION)]
    if not records:
        raise UserError(f"{folder.store}: holds no demonstrations; put back a copy of it, or start again with --from")
    return Selection(tuple(records))
