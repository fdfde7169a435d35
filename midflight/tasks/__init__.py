"""Tasks: questions with checkable answers, from a file or from a built-in family on real data."""

from __future__ import annotations

from midflight.tasks.atlas import AtlasSampler, atlas_tasks
from midflight.tasks.base import Task
from midflight.tasks.jsonl import TaskFileError, load_tasks

__all__ = ["AtlasSampler", "Task", "TaskFileError", "atlas_tasks", "load_tasks"]
