"""The folder of one run: where each of its files is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from midflight.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files. `create` makes the folders; files are made by whoever writes them."""

    path: Path

    def create(self) -> RunFolder:
        """Make the folder with `checkpoints` and `plots`; what is there stays."""
        for folder in (self.path, self.checkpoints, self.plots):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one process that writes here; the lock goes with the process, however that ends. Not on Windows.

        Raises:
            UserError: another one is.
        """
        if sys.platform == "win32":
            yield
            return
        import fcntl

        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"--run-dir {self.path}: another process is training there; let it end, or name another folder"
                ) from error
            yield
        finally:
            os.close(descriptor)

    @property
    def recipe(self) -> Path:
        """The resolved recipe; paths in it are relative to the run's folder."""
        return self.path / "recipe.yaml"

    @property
    def beginning(self) -> Path:
        """The recipe on its way to be `recipe`. Without `recipe` beside it, no run began yet."""
        return self.path / ".recipe.yaml"

    @property
    def inputs(self) -> Path:
        """Copies of the files that the recipe names: worked examples, task files."""
        return self.path / "inputs"

    @property
    def demonstrations(self) -> Path:
        """Where a supervised run has its demonstrations from; other runs have none. The store holds copies of them."""
        return self.inputs / "demonstrations.json"

    @property
    def own_tools(self) -> Path:
        """Names of the tools that the run's program gave as objects; a run of built-in tools has no such file."""
        return self.inputs / "own-tools.json"

    @property
    def own_tasks(self) -> Path:
        """The training questions that the run's program gave as objects."""
        return self.inputs / "train.jsonl"

    @property
    def own_eval_tasks(self) -> Path:
        """Likewise the held-out ones."""
        return self.inputs / "eval.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON line a training step."""
        return self.path / "metrics.jsonl"

    @property
    def usage(self) -> Path:
        """What engines on servers used so far: in steps, those that were lost or cut too, and in evaluations."""
        return self.path / "usage.json"

    @property
    def store(self) -> Path:
        """SQLite: every trajectory and turn."""
        return self.path / "store.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapters(self) -> Path:
        """Where a server that draws for the training reads the newest adapter."""
        return self.path / "adapters"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def report_text(self) -> Path:
        return self.path / "report.txt"

    @property
    def report_json(self) -> Path:
        return self.path / "report.json"

    @property
    def eval_before(self) -> Path:
        """`EvaluationResult` of the untrained planner."""
        return self.path / "eval_before.json"

    @property
    def eval_after(self) -> Path:
        """`EvaluationResult` of the trained planner."""
        return self.path / "eval_after.json"
