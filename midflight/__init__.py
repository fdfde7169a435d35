"""Midflight: a four-module tool-using agent, and Flow-GRPO, which trains its planner while it plans."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midflight.api import credit, solve, train_on

__version__ = "0.1.0"

__all__ = ["credit", "solve", "train_on"]


def __getattr__(name: str) -> Any:
    """Import the short way in only when it is asked for: an agent needs neither recipes nor a store."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from midflight import api

    return getattr(api, name)
