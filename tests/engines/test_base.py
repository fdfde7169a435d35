"""What requests are made of."""

from __future__ import annotations

from dataclasses import fields, replace

from midflight.engines.base import Sampling


def test_another_seed_leaves_all_else_as_it_is() -> None:
    one = Sampling(temperature=0.3, top_p=0.9, top_k=7, max_tokens=11, stop=("a", "b"), seed=1)
    plain = Sampling()
    assert all(getattr(one, field.name) != getattr(plain, field.name) for field in fields(Sampling))
    assert one.seeded(5) == replace(one, seed=5) and one.seeded(None) == replace(one, seed=None)
