"""The turns of one trajectory, and their rendering within a token budget.

Invariant: the text depends on the turns, the budget and the token count alone, and the part of a turn stays the same
while later turns are appended, until the budget is spent; then results are folded, oldest first. A sub-goal or a
verdict is never dropped. Full texts stay in the turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from midflight.agent.prompting import cut_middle, fenced, field, one_line
from midflight.agent.types import UNJUDGED, Action, ToolCall, ToolResult, Turn, Verdict
from midflight.engines.base import PromptTooLong

__all__ = ["Memory", "Style", "render_turn", "verdict_text"]

Style = Literal["compact", "full"]
CountTokens = Callable[[str], int]

_CHARACTERS_PER_TOKEN = 8
"""No text of interest averages more: a result is cut to this many characters a token before it is tokenised."""
_MOST_BYTES = 4
"""Of a character."""
_RAW_CHARACTERS = 200
"""Of a planner text that is not an action, so much is shown."""
_FOLDED_CONTEXT = 200
"""Characters of the context that a folded turn keeps."""
_FOLDED = "[folded]"


class Memory:
    """What one trajectory remembers; made by `AgentFlow.run` and gone with it.

    Args:
        budget_tokens: most tokens of all rendered turns together.
    """

    def __init__(self, budget_tokens: int = 512) -> None:
        self.budget_tokens = budget_tokens
        self._turns: list[Turn] = []
        self._rendered: dict[tuple[Style, int, CountTokens], _Rendered] = {}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The finished turns, in order."""
        return tuple(self._turns)

    @property
    def next_index(self) -> int:
        """The number of the turn to come; turns count from 1."""
        return len(self._turns) + 1

    def append(self, turn: Turn) -> None:
        """Add the turn numbered `next_index`.

        Raises:
            ValueError: the turn has another number.
        """
        if turn.index != self.next_index:
            raise ValueError(f"turn {turn.index} cannot follow {len(self._turns)} turns")
        self._turns.append(turn)

    def parts(self, budget_tokens: int, count_tokens: CountTokens, style: Style, beside: int = 0) -> tuple[str, ...]:
        """One text a turn, each ending in a line break, of at most `budget_tokens` tokens together.

        A result longer than half the budget is cut in the middle. While the sum is over the budget, the oldest turn
        not yet folded loses its result; so too, as far as that goes, to make room for `beside` tokens of another text.

        Raises:
            PromptTooLong: over the budget with all results folded.
        """
        key = (style, budget_tokens, count_tokens)
        rendered = self._rendered.get(key)
        if rendered is None:
            rendered = self._rendered[key] = _Rendered()
        for turn in self._turns[len(rendered.parts) :]:
            rendered.add(_part(turn, style, budget_tokens // 2, count_tokens))
        if rendered.total <= budget_tokens - beside:
            return tuple(rendered.texts)
        total, parts = rendered.total, list(rendered.parts)
        for position, turn in enumerate(self._turns):
            if total <= budget_tokens - beside:
                break
            if position == len(rendered.folded):
                rendered.folded.append(_part(turn, style, 0, count_tokens))
            folded = rendered.folded[position]
            if folded[1] < parts[position][1]:
                total += folded[1] - parts[position][1]
                parts[position] = folded
        if total > budget_tokens:
            raise PromptTooLong(f"memory of {len(parts)} turns takes {total} of {budget_tokens} tokens, all folded")
        return tuple([text for text, _ in parts])


class _Rendered:
    """Parts of turns with their tokens, made once: every later turn asks for them again."""

    __slots__ = ("folded", "parts", "texts", "total")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.parts: list[tuple[str, int]] = []
        self.folded: list[tuple[str, int]] = []
        self.total = 0

    def add(self, part: tuple[str, int]) -> None:
        self.texts.append(part[0])
        self.parts.append(part)
        self.total += part[1]


def _part(turn: Turn, style: Style, result_tokens: int, count_tokens: CountTokens) -> tuple[str, int]:
    text = _turn_part(turn, style, result_tokens, count_tokens)
    return text, count_tokens(text)


def _turn_part(turn: Turn, style: Style, result_tokens: int, count_tokens: CountTokens) -> str:
    return render_turn(
        turn.index,
        turn.action,
        turn.call,
        turn.result,
        turn.verdict,
        raw=turn.generation.text,
        style=style,
        result_tokens=result_tokens,
        count_tokens=count_tokens,
    )


def render_turn(
    index: int,
    action: Action | None,
    call: ToolCall | None,
    result: ToolResult,
    verdict: Verdict | None,
    *,
    raw: str = "",
    style: Style,
    result_tokens: int,
    count_tokens: CountTokens,
) -> str:
    """One turn as text.

    `result_tokens` bounds the result, the context and the arguments, each; 0 folds the turn. `raw` is shown when
    `action` is None. In compact style the action is one line and the result the next (and a verdict's reason one more);
    in full style the texts that may span lines are fenced.
    """
    folded = result_tokens == 0

    def fit(text: str) -> str:
        return _fit(text, result_tokens, count_tokens)

    text = _fold(result.text) if folded else fit(result.text)
    context = ""
    if action is not None:
        context = cut_middle(action.context, _FOLDED_CONTEXT) if folded else fit(action.context)
    if style == "compact":
        said = cut_middle(raw, _RAW_CHARACTERS) if action is None else _call_line(action.tool, context)
        return _compact(index, said, text, result, verdict)
    lines = [f"Turn {index}"]
    if action is None:
        lines += ["Text:", fenced(cut_middle(raw, _RAW_CHARACTERS))]
    else:
        lines += [
            f"Sub-goal: {one_line(action.sub_goal)}",
            f"Tool: {one_line(action.tool)}",
            field("Context", context),
        ]
        if call is not None and not folded and list(call.arguments.values()) not in ([action.context], []):
            lines.append(f"Arguments: {fit(json.dumps(dict(call.arguments), ensure_ascii=True, sort_keys=True))}")
    lines += [f"Error ({result.error}):" if result.error else "Result:", fenced(text)]
    if verdict is not None and verdict is not UNJUDGED and verdict != UNJUDGED:
        lines.append(f"Verdict: {'stop' if verdict.stop else 'continue'} {verdict_text(verdict)}".rstrip())
    return "\n".join(lines) + "\n\n"


def _compact(index: int, said: str, text: str, result: ToolResult, verdict: Verdict | None) -> str:
    line = f"Turn {index}: {one_line(said)}"
    if result.error is not None:
        line += f"\nError: {result.error}: {one_line(text)}"
    elif text:
        line += f"\nResult: {one_line(text)}"
    reason = verdict_text(verdict) if verdict is not None else ""
    return f"{line}\n" + (f"Verdict: {reason}\n" if reason else "")


def verdict_text(verdict: Verdict) -> str:
    """What a verdict says beside stop or continue, on one line; empty where nobody judged."""
    said = [] if verdict.valid is not False else ["the result is invalid"]
    said += [f"contradiction: {one_line(one)}" for one in verdict.contradictions]
    said += [one_line(verdict.reason)] if verdict.reason.strip() else []
    return "; ".join(said)


def _call_line(tool: str, context: str) -> str:
    return f"{tool}: {context}" if context else tool


def _fold(text: str) -> str:
    return text if len(text) <= len(_FOLDED) else _FOLDED


def _fit(text: str, tokens: int, count_tokens: CountTokens) -> str:
    """`text` cut in the middle to at most about `tokens` tokens; characters are cut first, so 1 MB costs little."""
    if len(text) * _MOST_BYTES <= tokens:  # most texts: a token has a byte at least
        return text
    limit = tokens * _CHARACTERS_PER_TOKEN
    cut = cut_middle(text, limit)
    while limit > tokens // 2 and count_tokens(cut) > tokens:
        limit = limit * 3 // 4
        cut = cut_middle(text, limit)
    return cut
