"""Forced tokens between the drawn ones of a turn: given the log-probs, they change neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from midflight.recipe.config import TrainingConfig
from midflight.training.packing import Row, pack_rows
from midflight.training.returns import Place, advantages, rows_of, weighted_rows
from midflight.training.rollouts import Group
from midflight.training.step import UpdateMetrics, Updater
from midflight.training.update import Scores
from tests.training.test_returns import TASK, trajectory

OBJECTIVES = [
    {"loss": "ppo_clip", "importance_cap": 1.2, "max_drift": 9.0},
    {"loss": "gspo"},
    {"loss": "gspo", "importance_cap": 1.2, "max_drift": 9.0},
    {"loss": "cispo"},
    {"loss": "reinforce", "kl_beta": 0.05, "kl_estimate": "k2", "entropy_beta": 0.1},
    {"loss": "ppo_clip", "kl_beta": 0.05, "kl_in": "reward", "kl_estimate": "k1"},
]


@dataclass(frozen=True)
class Drawn:
    """A drawn token: its log-probs, and how many forced tokens stand before it."""

    new: float
    drawn: float
    reference: float
    old: float
    before: int


logprob = st.floats(-3, -0.01)
turn = st.lists(st.builds(Drawn, logprob, logprob, logprob, logprob, st.integers(0, 2)), min_size=1, max_size=4)
path = st.lists(turn, min_size=1, max_size=2)


def column(tokens: Sequence[Drawn], name: str, *, split: bool) -> tuple[float, ...]:
    """A value of each token of a turn, 0 where it is forced; the last token is."""
    values: list[float] = []
    for token in tokens:
        values += [0.0] * (token.before if split else 0) + [getattr(token, name)]
    return (*values, 0.0)


def trained(paths: Sequence[Sequence[Sequence[Drawn]]], settings: TrainingConfig, *, split: bool) -> Any:
    """Loss, and its gradient by row and number of the drawn token, of a group of which the first alone was right."""
    members = []
    for turns in paths:
        made = trajectory([1] * len(turns))
        for index, tokens in enumerate(turns):
            logprobs = column(tokens, "drawn", split=split)
            generation = replace(
                made.turns[index].generation,
                ids=tuple(range(len(logprobs))),
                logprobs=logprobs,
                forced=tuple(value == 0 for value in logprobs),
                supports=(),
            )
            changed = replace(made.turns[index], generation=generation)
            made = replace(made, turns=(*made.turns[:index], changed, *made.turns[index + 1 :]))
        members.append(made)
    groups = [Group(TASK, tuple(members), (1.0, *[0.0] * (len(members) - 1)))]

    def of(place: Place, name: str) -> tuple[float, ...]:
        return column(paths[place.trajectory][place.turn], name, split=split)

    found = {
        place: replace(row, reference=of(place, "reference"), old=of(place, "old"))
        for place, row in rows_of(groups).items()
    }
    new = [of(place, "new") for place in found]
    rows = weighted_rows(groups, found, advantages(groups, settings, found), settings)
    updater = Updater(None, None, None, None, settings)  # type: ignore[arg-type]
    updater._fitting = lambda rows, work: new  # type: ignore[assignment, method-assign]
    batch = pack_rows(rows, 64)
    gaps = updater._turn_gaps(rows) if settings.loss == "gspo" else []
    loss, gradient = 0.0, {}
    for pack in batch.packs:
        scores = torch.tensor([new[term.row][term.position] for term in pack.terms], requires_grad=True)
        part = updater._loss(
            batch, pack, Scores(list(range(len(pack.terms))), scores, -2 * scores), UpdateMetrics(), gaps, None
        )
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
        assert scores.grad is not None
        for term, value in zip(pack.terms, scores.grad.tolist(), strict=True):
            gradient[term.row, number(rows[term.row], term.position)] = value
    return loss, gradient


def number(row: Row, position: int) -> int:
    return row.forced[:position].count(False)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: "-".join(map(str, one.values())))
@settings_of(max_examples=10, deadline=None)
@given(paths=st.lists(path, min_size=2, max_size=3), weighting=st.sampled_from(["trajectory", "turn", "token"]))
def test_a_turn_that_forced_tokens_split_trains_as_the_whole_one(
    objective: dict[str, Any], paths: list[list[list[Drawn]]], weighting: str
) -> None:
    settings = TrainingConfig(**{"kl_beta": 0.0, **objective, "weighting": weighting})
    whole, expected = trained(paths, settings, split=False)
    split, found = trained(paths, settings, split=True)
    assert len(expected) == sum(len(turn) for path in paths for turn in path)
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
