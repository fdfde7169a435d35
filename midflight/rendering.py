"""Turns, and foreign text in general, as people read them: while a run goes on, and in its report.

Invariant: tool output and model text are data: the terminal does not act on control characters in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from midflight.agent.memory import verdict_text
from midflight.agent.types import Claim, Turn
from midflight.tools.base import FINISH


def render_turn(turn: Turn) -> str:
    """One turn in one to four lines: what was chosen, the call where it says more, what came back, the verdict.

    What says nothing is left out: the call of `finish`, a call whose one argument is the context, an empty result,
    a verdict to go on without a reason.
    """
    if turn.action is None:
        chosen = f"no action in: {plain(turn.generation.text)}"
    else:
        context = f": {plain(turn.action.context)}" if turn.action.context.strip() else ""
        goal = f"  (to {plain(turn.action.sub_goal, 120)})" if turn.action.sub_goal else ""
        chosen = f"{plain(turn.action.tool, 60)}{context}{goal}"
    lines = [f"Turn {turn.index:<4} {chosen}"]
    if turn.call is not None and _says_more(turn):
        arguments = json.dumps(dict(turn.call.arguments), ensure_ascii=False, default=str)
        lines.append(f"  call    {plain(turn.call.tool, 60)} {plain(arguments)}")
    if turn.result.error is not None:
        lines.append(f"  error   {turn.result.error.value}: {plain(turn.result.text)}".rstrip())
    elif turn.result.text:
        lines.append(f"  result  {plain(turn.result.text)}")
    said = verdict_text(turn.verdict)
    if turn.verdict.stop or said:
        reason = f": {plain(said)}" if said else ""
        lines.append(f"  verdict {'stop' if turn.verdict.stop else 'continue'}{reason}")
    return "\n".join(lines)


def render_claim(claim: Claim) -> str:
    """A claim and what supports it, on one line."""
    named = [f"turn {number}" for number in claim.turns] + [plain(source, 120) for source in claim.sources]
    support = f"supported by {', '.join(named)}" if claim.supported else "unsupported"
    return f"{plain(claim.text)}  ({support})"


def _says_more(turn: Turn) -> bool:
    if turn.call is None or turn.call.tool == FINISH:
        return False
    arguments = list(turn.call.arguments.values())
    return turn.action is None or len(arguments) != 1 or str(arguments[0]).strip() != turn.action.context.strip()


def losses(count: int, total: int, reasons: Mapping[str, int]) -> str:
    """`3 of 8 trajectories were lost to infrastructure failures, 2 of them so: planner failed: ...`.

    `reasons` are as `statistics.infrastructure_reasons` gives them; the most frequent is said.
    """
    said = f"{count} of {total} trajectories were lost to infrastructure failures"
    if not reasons:
        return said
    reason = max(reasons, key=reasons.__getitem__)
    often = "" if reasons[reason] == count else f", {reasons[reason]} of them so"
    return f"{said}{often}: {reason}"


def unscored(stops: Mapping[str, int], spent: str, reasons: Mapping[str, int]) -> str:
    """Why nothing was measured of trajectories that ended for these reasons, all of them lost, with what to do.

    `spent` and `reasons` are as `statistics.budget_spent` and `infrastructure_reasons` give them.
    """
    total, said = sum(stops.values()), []
    if count := stops.get("budget", 0):
        said.append(f"{count} of {total} trajectories were ended by {spent}; set it higher")
    if count := stops.get("infrastructure", 0):
        said.append(losses(count, total, reasons))
    return "; ".join(said) or f"all ended as {', '.join(stops)}"


def printable(text: str) -> str:
    """`text` with `?` for each control character: a terminal has nothing to act on."""
    return "".join(character if character.isprintable() else "?" for character in text)


def plain(text: str, limit: int = 300) -> str:
    """Foreign text on one line of at most `limit` characters: white space folded, control characters as `?`."""
    safe = printable(" ".join(text.split()))
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."
