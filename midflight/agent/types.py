"""The words of the field, as types.

query: what is asked. turn: one pass of the loop. action: what the planner chose. trajectory: all turns of one query.
memory: the turns so far, as text. group: the G trajectories of one query. rollout: making trajectories.
Nothing here is changed once made: a trajectory is built once, of turns that are `records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from midflight.engines.base import Generation
from midflight.records import record
from midflight.tools.base import ErrorKind, ToolCall, ToolResult

__all__ = [
    "Action",
    "Answer",
    "Claim",
    "ErrorKind",
    "Generation",
    "Query",
    "StopReason",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "Verdict",
]


class StopReason(StrEnum):
    """Why a trajectory ended."""

    VERIFIED = "verified"
    """The verifier found the memory sufficient."""
    FINISHED = "finished"
    """The planner chose the built-in `finish` action."""
    MAX_TURNS = "max_turns"
    """The turn budget is spent; the generator still answers from memory."""
    MAX_SECONDS = "max_seconds"
    """The time budget is spent; a running tool was interrupted. Not where waits for engines took more than half."""
    CONTEXT_OVERFLOW = "context_overflow"
    """A module's prompt no longer fits the engine's context even with memory folded to its budget."""
    CANCELLED = "cancelled"
    """The caller cancelled the run."""
    INFRASTRUCTURE = "infrastructure"
    """An engine, judge or sandbox failed after retries. Left out of the group and counted; never a reward of 0."""
    BUDGET = "budget"
    """The run's budget of tokens or money was spent before the trajectory ended. Likewise; an evaluation counts
    it wrong, as it does INFRASTRUCTURE."""

    @property
    def lost(self) -> bool:
        """Whether it ended by what is not the agent's doing: nothing was earned, so nothing is scored."""
        return self in (StopReason.CANCELLED, StopReason.INFRASTRUCTURE, StopReason.BUDGET)


@dataclass(frozen=True)
class Query:
    """What is asked. `seed` seeds every draw of the trajectory; two trajectories of one group differ only in it."""

    text: str
    id: str = ""
    seed: int | None = None


@record
class Action:
    """What the planner chose: a sub-goal, a tool, and the context the executor needs to call it."""

    sub_goal: str
    tool: str
    context: str


@dataclass(frozen=True)
class Verdict:
    """The verifier's word on a turn: `stop` ends the loop; the rest is shown to the planner where there is something.

    `valid` is the latest result, `sufficient` the memory; None: nobody judged. `contradictions`, each the turns whose
    results it is between, keep the loop going.
    """

    stop: bool
    reason: str = ""
    valid: bool | None = None
    sufficient: bool | None = None
    contradictions: tuple[str, ...] = ()


UNJUDGED = Verdict(stop=False)
"""Of a turn that nobody judged."""


@record
class Turn:
    """One pass of the loop. `action` is None when the planner's text was not an action (`result` then says why).

    `generation` is the planner's; it is what trains. `other_generations` are the executor's and verifier's, by module.
    """

    index: int
    """Counts from 1."""
    generation: Generation
    action: Action | None
    call: ToolCall | None
    result: ToolResult
    verdict: Verdict
    seconds: float = 0.0
    other_generations: tuple[tuple[str, Generation], ...] = ()


@dataclass(frozen=True)
class Claim:
    """A statement of the answer, the turns that support it, and the sources that their results name."""

    text: str
    turns: tuple[int, ...]
    sources: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        """Whether it names a turn."""
        return bool(self.turns)


@dataclass(frozen=True)
class Answer:
    """The generator's output."""

    text: str
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """All of one run: its turns in order, why it stopped, and the answer (None if it ended before one was made)."""

    query: Query
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: Answer | None
    analysis: str = ""
    error: str = ""
    """What failed, for INFRASTRUCTURE and CONTEXT_OVERFLOW; what the generator wrote, where that is no answer."""
    seconds: float = 0.0
