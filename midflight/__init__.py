"""Midflight: a four-module tool-using agent, and Flow-GRPO, which trains its planner while it plans."""

__version__ = "0.1.0"
