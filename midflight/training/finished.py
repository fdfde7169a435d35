"""What a run gave, and whether there is anything left of it to do."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.errors import UserError
from midflight.evaluation import EvaluationResult
from midflight.evaluation.report import read_closing
from midflight.progress import Progress
from midflight.store import RunFolder
from midflight.store.seals import newest_whole, read_state


@dataclass(frozen=True)
class TrainReport:
    """What a run gave. `before` and `after` are None without held-out questions.

    `seconds` are those of this session and of the steps that earlier ones made.
    """

    folder: RunFolder
    steps: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    seconds: float


def finished(folder: RunFolder, progress: Progress) -> TrainReport | None:
    """What a run gave that has its last step's checkpoint and its report; None for any other run."""
    closing = read_closing(folder)
    whole = all(file.is_file() for file in (folder.report_text, folder.eval_before, folder.eval_after))
    if closing is None or not whole:
        return None
    try:
        newest = newest_whole(folder.checkpoints, lambda _: None)
    except UserError:  # none is whole: the resume that follows says so, with every reason
        return None
    if newest is None or read_state(newest)["step"] != closing.steps:
        return None
    progress.note(f"{folder.path} is finished: nothing to do")
    before, after = EvaluationResult.load(folder.eval_before), EvaluationResult.load(folder.eval_after)
    return TrainReport(folder, closing.steps, before, after, closing.seconds)
