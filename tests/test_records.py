"""What records keep of frozen dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace

import pytest

from midflight.agent import Action
from midflight.engines.base import Message, Sampling


def test_records_compare_hash_and_copy_by_their_fields() -> None:
    one = Sampling(seed=1, stop=("a",))
    assert one == Sampling(seed=1, stop=("a",)) and hash(one) == hash(Sampling(seed=1, stop=("a",)))
    assert one != Sampling(seed=2, stop=("a",)) and one != Message("user", ())
    assert replace(one, seed=2) == Sampling(seed=2, stop=("a",)) and one.seed == 1
    assert asdict(Action("a", "b", "c")) == {"sub_goal": "a", "tool": "b", "context": "c"}
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_a_record_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Sampling().temprature = 0.5  # type: ignore[attr-defined]
