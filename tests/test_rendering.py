"""Turns as `midflight solve` streams them."""

from __future__ import annotations

from midflight.agent.types import Action, ErrorKind, ToolCall, ToolResult, Turn, Verdict
from midflight.engines.base import FinishReason, Generation
from midflight.rendering import plain, render_turn, unscored


def turn(action: Action | None, result: ToolResult, verdict: Verdict, call: ToolCall | None = None) -> Turn:
    return Turn(2, Generation("no idea", FinishReason.STOP), action, call, result, verdict)


def test_a_turn_that_worked() -> None:
    shown = turn(Action("find it", "capital", "Peru"), ToolResult("Lima"), Verdict(True, "enough"))
    assert render_turn(shown) == "Turn 2    capital: Peru  (to find it)\n  result  Lima\n  verdict stop: enough"


def test_a_turn_that_failed() -> None:
    shown = turn(None, ToolResult("write tool: context", ErrorKind.INVALID_ACTION), Verdict(False))
    assert render_turn(shown) == "Turn 2    no action in: no idea\n  error   invalid_action: write tool: context"


def test_a_call_is_shown_where_it_says_more_than_the_action() -> None:
    action, result = Action("", "number", " 7 "), ToolResult("seven")
    same = turn(action, result, Verdict(False), ToolCall("number", {"key": 7}))
    assert render_turn(same) == "Turn 2    number: 7\n  result  seven"
    other = turn(action, result, Verdict(False, "go on"), ToolCall("number", {"key": 7, "base": "é"}))
    assert render_turn(other).splitlines()[1:] == [
        '  call    number {"key": 7, "base": "é"}',
        "  result  seven",
        "  verdict continue: go on",
    ]
    end = turn(Action("", "finish", ""), ToolResult(""), Verdict(False), ToolCall("finish", {}))
    assert render_turn(end) == "Turn 2    finish"


def test_tool_output_cannot_drive_the_terminal() -> None:
    assert plain("a\x1b[31mb\nc") == "a?[31mb c"
    assert len(plain("x" * 5000)) == 300
    hostile = turn(Action("", "t\x1b[2J", "c\nTurn 9"), ToolResult("r\u2028Turn 9"), Verdict(False))
    assert render_turn(hostile) == "Turn 2    t?[2J: c Turn 9\n  result  r Turn 9"


def test_why_nothing_was_measured() -> None:
    spent, reasons = "budget.tokens = 1: spent, with 45 tokens", {"s: down": 1}
    assert unscored({"budget": 3}, spent, {}) == f"3 of 3 trajectories were ended by {spent}; set it higher"
    assert unscored({"infrastructure": 1, "budget": 2}, spent, reasons) == (
        f"2 of 3 trajectories were ended by {spent}; set it higher; 1 of 3 trajectories were lost to infrastructure "
        "failures: s: down"
    )
    assert unscored({"cancelled": 2}, "", {}) == "all ended as cancelled"
