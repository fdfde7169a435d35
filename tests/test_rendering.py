"""Turns as `midflight solve` streams them."""

from __future__ import annotations

from midflight.agent.types import Action, ErrorKind, ToolResult, Turn, Verdict
from midflight.engines.base import FinishReason, Generation
from midflight.rendering import plain, render_turn


def turn(action: Action | None, result: ToolResult, verdict: Verdict) -> Turn:
    return Turn(2, Generation("no idea", FinishReason.STOP), action, None, result, verdict)


def test_a_turn_that_worked() -> None:
    shown = turn(Action("find it", "capital", "Peru"), ToolResult("Lima"), Verdict(True, "enough"))
    assert render_turn(shown) == "turn 2  find it | capital: Peru\n        = Lima\n        stop: enough"


def test_a_turn_that_failed() -> None:
    shown = turn(None, ToolResult("write tool: context", ErrorKind.INVALID_ACTION), Verdict(False))
    assert render_turn(shown) == "turn 2  not an action: no idea\n        invalid_action: write tool: context"


def test_tool_output_cannot_drive_the_terminal() -> None:
    assert plain("a\x1b[31mb\nc") == "a?[31mb c"
    assert len(plain("x" * 5000)) == 200
