"""Turns as people watch them go by.

Invariant: tool output and model text are data: the terminal does not act on control characters in them.
"""

from __future__ import annotations

from midflight.agent.types import Turn

WIDTH = 200
"""Most characters of a result shown while a run goes on; the store has all of it."""


def render_turn(turn: Turn) -> str:
    """One turn in two or three lines: what was chosen, what came back, and the verdict when it says something."""
    if turn.action is None:
        chosen = f"not an action: {plain(turn.generation.text)}"
    else:
        chosen = f"{plain(turn.action.tool)}: {plain(turn.action.context)}".rstrip(": ")
        if turn.action.sub_goal:
            chosen = f"{plain(turn.action.sub_goal)} | {chosen}"
    lines = [f"turn {turn.index}  {chosen}"]
    if turn.result.error is not None:
        lines.append(f"        {turn.result.error.value}: {plain(turn.result.text)}")
    elif turn.result.text:
        lines.append(f"        = {plain(turn.result.text)}")
    if turn.verdict.reason:
        lines.append(f"        {'stop' if turn.verdict.stop else 'go on'}: {plain(turn.verdict.reason)}")
    return "\n".join(lines)


def plain(text: str) -> str:
    """`text` on one line, control characters as `?`, cut to `WIDTH` characters."""
    safe = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return safe if len(safe) <= WIDTH else safe[: WIDTH - 3] + "..."
