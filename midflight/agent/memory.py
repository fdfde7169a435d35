"""Memory: the turns of one trajectory, rendered to text within a token budget.

Invariant: the same turns give the same text, always; the budget holds whatever a tool returned; a sub-goal, a tool's
name, an error kind or a verdict is never dropped. Tool output is data: in the compact style it is one line, in the full
style it stands in a fence longer than any inside it, so it can fake neither a turn nor the fence's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from midflight.agent.types import Turn
from midflight.engines.base import PromptTooLong

Style = Literal["compact", "full"]
CountTokens = Callable[[str], int]

LIMITS = (2000, 600, 200, 60, 0)
"""Characters of a result, tried from the left: first for the oldest turns, then for all, until the budget holds."""
RAW_LIMIT = 120
"""Characters shown of a text that was no action."""


class Memory:
    """The turns so far. Made by `AgentFlow.run` and gone with it."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def append(self, turn: Turn) -> None:
        self._turns.append(turn)

    def parts(self, budget: int, count_tokens: CountTokens, style: Style) -> tuple[str, ...]:
        """One text a turn, oldest first, at most `budget` tokens together.

        Long results lose their middle; while that is not enough the oldest results are folded first.

        Raises:
            PromptTooLong: the budget is too small even with every result folded.
        """
        count = len(self._turns)
        for level in range(len(LIMITS)):
            # From the gentlest: the oldest turns move to the next limit one after another, the newest last.
            for folded in range(0 if level == 0 else 1, 1 if level == 0 else count + 1):
                limits = [LIMITS[level] if index < folded else LIMITS[max(level - 1, 0)] for index in range(count)]
                parts = tuple(render(turn, limit, style) for turn, limit in zip(self._turns, limits, strict=True))
                if sum(map(count_tokens, parts)) <= budget:
                    return parts
        raise PromptTooLong(f"memory of {count} turns does not fit memory_tokens={budget} even with results folded")


def render(turn: Turn, limit: int, style: Style) -> str:
    """The text of one turn, its result cut to about `limit` characters."""
    return _compact(turn, limit) if style == "compact" else _full(turn, limit)


def cut(text: str, limit: int) -> str:
    """Head and tail of `text`, with a mark that says how much is missing."""
    if len(text) <= limit:
        return text
    if limit == 0:
        return f"[{len(text)} characters folded]"
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]} [{len(text) - head - tail} characters cut] {text[len(text) - tail :] if tail else ''}"


def flat(text: str) -> str:
    """`text` on one line: line breaks and control characters become spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _result(turn: Turn, limit: int) -> str:
    text = cut(turn.result.text, limit)
    return f"error {turn.result.error.value}: {text}" if turn.result.error else text


def _compact(turn: Turn, limit: int) -> str:
    if turn.action is None:
        action = flat(cut(turn.generation.text, RAW_LIMIT))
    else:
        action = f"{turn.action.tool}: {flat(turn.action.context)}" if turn.action.context else turn.action.tool
    reason = f" ({flat(turn.verdict.reason)})" if turn.verdict.reason else ""
    return f"Turn {turn.index}: {action}\nResult: {flat(_result(turn, limit))}{reason}\n"


def _full(turn: Turn, limit: int) -> str:
    if turn.action is None:
        lines = [f"Turn {turn.index}", f"Not an action: {flat(cut(turn.generation.text, RAW_LIMIT))}"]
    else:
        lines = [f"Turn {turn.index}", f"Sub-goal: {flat(turn.action.sub_goal)}", f"Tool: {flat(turn.action.tool)}"]
        lines.append(f"Context: {flat(turn.action.context)}")
    result = _result(turn, limit)
    fence = "~" * max([3, *(len(run) + 1 for run in re.findall("~+", result))])
    lines += ["Result:", fence, result, fence]
    if turn.verdict.reason:
        lines.append(f"Verdict: {'stop' if turn.verdict.stop else 'continue'}: {flat(turn.verdict.reason)}")
    return "\n".join(lines) + "\n"
