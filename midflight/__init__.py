"""Midflight: a four-module tool-using agent, and Flow-GRPO, which trains its planner while it plans."""

__version__ = "0.1.0"

from midflight.api import credit, solve, train_on

__all__ = ["credit", "solve", "train_on"]
