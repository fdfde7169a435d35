"""From a session to its end: the run's folder is taken, and what stopped the run is told in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from midflight.engines.local.memory import is_out_of_memory
from midflight.errors import NO_ROOM, CannotWrite, TrainingStopped
from midflight.recipe.resuming import begin
from midflight.training.drift import DriftError
from midflight.training.finished import TrainReport
from midflight.training.policy import SyncError
from midflight.training.session import Session
from midflight.training.step import GradientError, OutOfMemory


def conduct(
    session: Session, *, resume: bool, evaluate_ends: bool, keep: Callable[[], None] = lambda: None
) -> TrainReport:
    """Run a session to its end; `keep` writes what a new run keeps of what it was given.

    Raises:
        UserError: since it was looked at, another process made a run in the folder.
        TrainingStopped: sampler and trainer disagree, the gradient is not finite, memory ran out, or the run cannot be
            written.
    """
    try:
        with session.folder.create().locked():
            if not resume:
                begin(session.folder)
                keep()
            return session.run(resume=resume, evaluate_ends=evaluate_ends)
    except TrainingStopped:  # also one that tells of an engine out of memory
        raise
    except (DriftError, SyncError, GradientError, OutOfMemory) as error:
        raise TrainingStopped(str(error)) from error
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CannotWrite(Path(error.filename or session.folder.path), error) from error
    except (MemoryError, RuntimeError) as error:  # beside the packs: rollouts, the optimizer's state, a sync
        if not is_out_of_memory(error):
            raise
        problem = " ".join(str(error).split())[:160] or "the interpreter's own"
        raise TrainingStopped(f"out of memory: {problem}; make room and go on with --resume") from error
    finally:
        session.close()
