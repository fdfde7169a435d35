"""A recorded trajectory as the planner of a recipe would have met and written it: rows that train by imitation.

Invariant: the prompt of a row is the one the planner is given at that turn, and its ids are a whole action that the
planner can draw. Where the recording is of the same prompt and text, the recorded ids are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from midflight.agent.actions import render_action
from midflight.agent.flow import AgentFlow
from midflight.agent.memory import Memory
from midflight.agent.planner import LLMPlanner
from midflight.agent.types import Action, Generation, Trajectory
from midflight.engines.base import GenerateRequest, PromptTooLong
from midflight.engines.local import LocalEngine
from midflight.engines.local.grammar import GrammarError
from midflight.tasks.base import Task
from midflight.training.packing import Row

TEMPERATURE = 1.0
"""Of the distribution under which demonstrations are likely: the planner's own, not sharpened for rollouts."""


class NotShowable(ValueError):
    """The planner could not have made this trajectory; the message is the reason, in the words of a summary."""


@dataclass(frozen=True)
class Demonstration:
    """A trajectory to imitate. Its turns are those that are shown, one row each, without advantage and weight."""

    task: Task
    trajectory: Trajectory
    rows: tuple[Row, ...]

    @property
    def length(self) -> tuple[int, int]:
        """Turns and tokens."""
        return len(self.rows), sum(len(row.ids) for row in self.rows)


def replay(task: Task, trajectory: Trajectory, flow: AgentFlow, engine: LocalEngine) -> Demonstration:
    """Replay a trajectory through the planner of `flow`, whose engine is `engine`.

    A turn that is no action is not shown, and is in the memory of the turns after it.

    Raises:
        NotShowable: the planner could not have made it.
    """
    planner = flow.planner
    assert isinstance(planner, LLMPlanner)
    if len(trajectory.turns) > flow.max_turns:
        raise NotShowable("more turns than agent.max_turns")
    if flow.analyst is not None and not trajectory.analysis:
        raise NotShowable("no query analysis")
    analysis = trajectory.analysis if flow.analyst is not None else ""
    memory = Memory(flow.memory_tokens)
    shown, rows = [], []
    for turn in trajectory.turns:
        if turn.action is not None:
            if turn.action.tool not in flow.toolset:
                raise NotShowable("a tool that agent.tools lacks")
            try:
                left = flow.max_turns - turn.index + 1
                request = planner.request(trajectory.query, flow.toolset, memory, left, analysis)
            except PromptTooLong:
                raise NotShowable("over agent.memory_tokens") from None
            row = _row(request, turn.action, turn.generation, planner, engine)
            if not all(row.forced):
                shown.append(turn)
                rows.append(row)
        memory.append(turn)
    if not rows:
        raise NotShowable("nothing that was a choice")
    return Demonstration(task, replace(trajectory, turns=tuple(shown)), tuple(rows))


def _row(
    request: GenerateRequest, action: Action, recorded: Generation, planner: LLMPlanner, engine: LocalEngine
) -> Row:
    prompt = tuple(token for segment in engine.encode(request.messages) for token in segment)
    if len(prompt) + request.sampling.max_tokens > engine.context_length:
        raise NotShowable("over model.context_length")
    try:
        text = render_action(action, planner.format)
    except ValueError as error:
        raise NotShowable(f"not in the format {planner.format}: {error}") from None
    ids = tuple(engine.encode_text(text))
    if request.grammar is None:  # then an end token ends the action
        ids += (int(engine.tokenizer.eos_token_id),)
    if (recorded.prompt_ids, recorded.text, recorded.grammar) == (prompt, text, request.grammar):
        ids = recorded.ids
    if not all(0 <= token < engine.masks.vocabulary for token in ids):
        raise NotShowable("token ids that the model lacks")
    if len(ids) > request.sampling.max_tokens:
        raise NotShowable("an action over agent.planner.max_tokens")
    forced: tuple[bool, ...] = (False,) * len(ids)
    if request.grammar is not None:
        try:
            forced = engine.masks.forced(request.grammar, ids)
        except GrammarError:
            raise NotShowable("an action that the planner's grammar does not allow") from None
    nobody_drew = (0.0,) * len(ids)
    return Row(prompt, ids, nobody_drew, forced, TEMPERATURE, request.grammar)
