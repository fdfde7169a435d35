"""The planner's action as text: its two formats, the grammar that holds a model to one, and references to results.

Invariant: a text is either exactly the agreed format or no action at all; nothing is repaired by guessing. Whatever
`planner_grammar` accepts, `parse_action` reads as an action, and `resolve` finds every result it refers to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midflight.agent.memory import Style
from midflight.agent.strict import object_schema, parse_fields, said
from midflight.agent.types import Action, Turn
from midflight.engines.base import FinishReason, Generation
from midflight.tools.base import FINISH, argument_schema

if TYPE_CHECKING:
    from midflight.tools.base import Tool, Toolset

__all__ = [
    "ReferenceNotFound",
    "action_schema",
    "parse_action",
    "parse_json_action",
    "planner_grammar",
    "refers",
    "render_action",
    "resolve",
]

_EXPECTED: dict[Style, str] = {
    "compact": f'expected one line "tool: context" or "{FINISH}"',
    "full": f'expected "Sub-goal: ...", "Tool: ...", "Context: ..." on lines of their own (no context for "{FINISH}")',
}
_COMPACT = re.compile(r" ?(?P<tool>[^\s:]+): (?P<context>[^\n]+)\n?")
_COMPACT_FINISH = re.compile(rf" ?{FINISH}\n?")
_FULL = re.compile(r"Sub-goal: (?P<sub_goal>[^\n]+)\nTool: (?P<tool>[^\s:]+)\nContext: (?P<context>.+)", re.DOTALL)
_FULL_FINISH = re.compile(rf"Sub-goal: (?P<sub_goal>[^\n]+)\nTool: {FINISH}(\nContext:(?P<context>.*))?\s*", re.DOTALL)
_CLASS = r"\[(?!\^)(?:[^\]\\\n]|\\[^nrsSDWpPbBxu])+\]"
_SIMPLE_PATTERN = re.compile(rf"\^?((?:{_CLASS}|\({_CLASS}(?:\|\w+)*\))(?:\{{[1-9]\d*(?:,\d*)?\}}|\+))\$?")
_LINE = "[^ \\t\\r\\n][^\\r\\n]{0,%d}"
_NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.[0-9]+|[0-9]+")
_PLAIN_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_EDGE = " \\t\\r\\n.,;:?!"
_QUOTABLE = 2000
"""Characters of the question that can be quoted."""
_REFERENCE = re.compile(r"#([0-9]+)")
_MOST_DIGITS = 10
"""Of the number of a turn, with any zeros before it; Python reads no number of thousands."""


class ReferenceNotFound(ValueError):
    """A context refers to a turn that has no result."""


def parse_action(generation: Generation, format: Style) -> tuple[Action | None, str]:
    """The action that the text is, or None and the reason, which states the expected format.

    compact: `tool: context` or `finish`, one line, with at most one leading space (a prompt that ends in "Turn 2:"
    is continued by one). full: three fields in order, see also `said`; the context runs to the end, and is optional for
    `finish`.
    """
    text = generation.text if format == "compact" else said(generation.text)
    if generation.finish_reason is FinishReason.LENGTH and not (format == "compact" and text.endswith("\n")):
        return None, f"the text was cut off by the token limit; {_EXPECTED[format]}"
    finish = (_COMPACT_FINISH if format == "compact" else _FULL_FINISH).fullmatch(text) if FINISH in text else None
    match = finish or (_COMPACT if format == "compact" else _FULL).fullmatch(text)
    if match is None or match is not finish and match["tool"] == FINISH:
        thinks = format == "full" and ("<think>" in text or "</think>" in text)
        return (
            None,
            f"{'a thought is one block from <think> to </think>, before the action; ' * thinks}{_EXPECTED[format]}",
        )
    fields = match.groupdict()
    sub_goal, context = fields.get("sub_goal", ""), fields.get("context") or ""
    if format == "full" and not sub_goal.strip() or match is not finish and not context.strip():
        return None, f"a sub-goal and a context are more than blanks; {_EXPECTED[format]}"
    if match is finish:
        return Action(sub_goal, FINISH, context.strip()), ""
    return Action(sub_goal, match["tool"], context.rstrip("\n")), ""


def parse_json_action(generation: Generation) -> tuple[Action | None, str]:
    """The same of an action as JSON, `action_schema`'s."""
    try:
        fields = parse_fields(generation, {"sub_goal": str, "tool": str, "context": str})
    except ValueError as error:
        return None, f'expected one JSON object {{"sub_goal", "tool", "context"}}: {error}'
    sub_goal, tool, context = fields["sub_goal"], fields["tool"], fields["context"]
    if not sub_goal.strip() or len(sub_goal.splitlines()) > 1 or not re.fullmatch(r"[^\s:]+", tool):
        return None, "expected a sub-goal of one line and the name of a tool"
    if tool != FINISH and not context.strip():
        return None, f'expected a context, which only "{FINISH}" can do without'
    return Action(sub_goal, tool, context.strip() if tool == FINISH else context), ""


def action_schema(toolset: Toolset) -> str:
    """The JSON schema, as text, of an action over the tools' names."""
    text = {"type": "string"}
    return object_schema({"sub_goal": text, "tool": {**text, "enum": list(toolset.names)}, "context": text})


def render_action(action: Action, format: Style) -> str:
    """The text of `format` that `parse_action` reads as `action`, spelt as `planner_grammar` has it.

    `compact` has no place for a sub-goal, nor for a context of `finish`: they are left out.

    Raises:
        ValueError: no text of the format means this action; the message says what is in the way.
    """
    expected = action
    if format == "compact":
        expected = Action("", action.tool, "" if action.tool == FINISH else action.context)
        text = f" {action.tool}: {action.context}\n" if action.tool != FINISH else f" {FINISH}\n"
    else:
        context = f"Context: {action.context}\n" if action.context or action.tool != FINISH else ""
        text = f"Sub-goal: {action.sub_goal}\nTool: {action.tool}\n{context}"
    if parse_action(Generation(text, FinishReason.STOP), format)[0] != expected:
        if format == "full" and not action.sub_goal:
            raise ValueError("no sub-goal")
        raise ValueError("a field that is empty, or has line breaks or spaces where the format has none")
    return text


def refers(context: str) -> bool:
    """Whether a context names the result of a turn, as `resolve` reads it."""
    return _REFERENCE.search(context) is not None


def resolve(context: str, turns: Sequence[Turn]) -> str:
    """`context` with each `#n` replaced by the result of turn n.

    A result that is more than a plain number is put in parentheses where other text is beside it.

    Raises:
        ReferenceNotFound: turn n has no result; the message says so to the planner.
    """
    results = _results(turns)

    def found(match: re.Match[str]) -> str:
        text = results.get(int(match[1])) if len(match[1]) < _MOST_DIGITS else None
        if text is None:
            raise ReferenceNotFound(f"{match[0][:40]} refers to no result; turns with one: {_listed(results)}")
        return text if match[0] == context or _PLAIN_NUMBER.fullmatch(text) else f"({text})"

    return _REFERENCE.sub(found, context)


def planner_grammar(toolset: Toolset, format: Style, question: str | None = None, turns: Sequence[Turn] = ()) -> str:
    """A Lark grammar (llguidance dialect) whose texts are the actions of `format` over the tools' names.

    A tool whose only parameter is a string with a simple `pattern` (a repeated character class, perhaps with words
    beside it: `^([0-9+ ]|sqrt){1,80}$`) takes that as its argument; any other argument is one line. `finish` takes
    none. The text ends in a line break, so no end token is drawn.

    With `question`, arguments are grounded: whole words in a row from the question, or `#n`, the result of turn n,
    where the pattern allows what that result is. Under a pattern for arithmetic (`7 + 7` fits, words do not) an
    argument may have any form the pattern allows, but its numbers are the question's or `#n`, and there is at least
    one; so constants such as 100 cannot be written. A tool that could be given nothing is left out.
    """
    alternatives, terminals = [], []
    joint = ": " if format == "compact" else "\nContext: "
    width = 60 if format == "compact" else 400
    for number, tool in enumerate(toolset):
        if tool.name == FINISH:
            alternatives.append(json.dumps(FINISH))
            continue
        pattern = _simple_pattern(tool)
        argument: str | None = f"/{pattern or _LINE % (width - 1)}/"
        if question is not None:
            argument = _grounded(pattern, question, _results(turns), width)
        if argument is not None:
            alternatives.append(f"{json.dumps(tool.name + joint)} ARGUMENT_{number}")
            terminals.append(f"ARGUMENT_{number}: {argument}")
    if question is not None:
        terminals.append(f"QUOTE: %regex {json.dumps({'substring_words': question[:_QUOTABLE]})}")
    if format == "compact":
        start = 'start: " " call "\\n"'
    else:
        start = 'start: "Sub-goal: " SUB_GOAL "\\nTool: " call "\\n"'
        terminals.append(f"SUB_GOAL: /{_LINE % 119}/")
    return "\n".join([start, "call: " + " | ".join(alternatives), *terminals]) + "\n"


def _grounded(pattern: str | None, question: str, results: dict[int, str], width: int) -> str | None:
    """The terminal of a grounded argument; None when there is nothing it could be."""
    question = question[:_QUOTABLE]
    if pattern is not None and re.fullmatch(pattern, "7 + 7") and not re.fullmatch(pattern, "zq"):
        names = {f"#{turn}" for turn, text in results.items() if _PLAIN_NUMBER.fullmatch(text.removeprefix("-"))}
        numbers = sorted(names | {_plain(text) for text in _NUMBER.findall(question)})
        if not numbers:
            return None
        one, rest = f"({'|'.join(map(re.escape, numbers))})", r"[^0-9.#\n]"
        return f"/{pattern.replace('[', '[#', 1)}/ & /({rest}*{one}{rest}+)*{rest}*{one}{rest}*/"
    forms = [json.dumps(f"#{turn}") for turn, text in results.items() if not pattern or re.fullmatch(pattern, text)]
    if any(not pattern or re.fullmatch(pattern, word) for word in re.findall(r"\w+", question)):
        quote = f"/[^{_EDGE}#]([^\\r\\n#]{{0,{width - 2}}}[^{_EDGE}#])?/"
        forms.append(f"(QUOTE & {quote}{f' & /{pattern}/' if pattern else ''})")
    return " | ".join(forms) or None


def _plain(number: str) -> str:
    """A number of a question as an expression writes it: no thousands separators, a digit before the point."""
    return ("0" if number.startswith(".") else "") + number.replace(",", "")


def _results(turns: Sequence[Turn]) -> dict[int, str]:
    """Result by turn, of the turns that have one."""
    return {turn.index: turn.result.text for turn in turns if turn.result.error is None and turn.result.text}


def _listed(results: dict[int, str]) -> str:
    return ", ".join(f"#{turn}" for turn in results) or "none"


def _simple_pattern(tool: Tool) -> str | None:
    """The pattern of a tool's only parameter as the inside of a Lark regex, if it is one llguidance reads."""
    properties = tool.parameters.get("properties", {})
    if len(properties) == 1:
        schema = argument_schema(tool, *properties)
        simple = _SIMPLE_PATTERN.fullmatch(schema.get("pattern", "")) if schema.get("type") == "string" else None
        if simple:
            return re.sub(r"\\.|/", lambda piece: "\\/" if piece[0] == "/" else piece[0], simple[1])
    return None
