"""Small values that a turn makes many of.

Invariant: once made, a record is never changed. The type checker holds to that, as with a frozen dataclass; Python does
not, since each field would cost 0.3 us more: with a dozen records a turn, a tenth of what a turn may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """`cls` as a dataclass with slots that compares and hashes by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
