"""The planner chooses the next action; it is the module that training changes.

Invariant: the planner's text is either exactly the agreed format or no action at all. Nothing is repaired by guessing,
and the prompt of turn t+1 repeats the parts of turn t's up to its last part, so their ids are shared.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from midflight.agent.memory import Memory, Style
from midflight.agent.prompting import one_line, query_part, request_seed, template
from midflight.agent.types import Action, Query
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Generation, Message, Sampling
from midflight.tools.base import FINISH

if TYPE_CHECKING:
    from midflight.tools.base import Tool, Toolset

__all__ = ["Analyst", "LLMAnalyst", "LLMPlanner", "Plan", "Planner", "parse_action", "planner_grammar"]

_EXPECTED: dict[Style, str] = {
    "compact": f'expected one line "tool: context" or "{FINISH}"',
    "full": f'expected "Sub-goal: ...", "Tool: ...", "Context: ..." on lines of their own (no context for "{FINISH}")',
}
_COMPACT = re.compile(r" ?(?P<tool>[^\s:]+): (?P<context>[^\n]+)\n?")
_COMPACT_FINISH = re.compile(rf" ?{FINISH}\n?")
_FULL = re.compile(r"Sub-goal: (?P<sub_goal>[^\n]+)\nTool: (?P<tool>[^\s:]+)\nContext: (?P<context>.+?)\n*", re.DOTALL)
_FULL_FINISH = re.compile(rf"Sub-goal: (?P<sub_goal>[^\n]+)\nTool: {FINISH}(\nContext:(?P<context>.*))?\s*", re.DOTALL)
_CLASS = r"\[(?!\^)(?:[^\]\\\n]|\\[^nrsSDWpPbBxu])+\]"
_SIMPLE_PATTERN = re.compile(rf"\^?((?:{_CLASS}|\({_CLASS}(?:\|\w+)*\))(?:\{{[1-9]\d*(?:,\d*)?\}}|\+))\$?")
_LINE = "[^ \\t\\r\\n][^\\r\\n]{0,%d}"
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_EDGE = " \\t\\r\\n.,;:?!"
_QUOTABLE_CHARACTERS = 2000
"""Of a question or a result, so much can be quoted."""


@dataclass(frozen=True)
class Plan:
    """What the planner wrote and what it means. `action` is None when the text is not one; `problem` then says why."""

    generation: Generation
    action: Action | None
    problem: str = ""


class Planner(Protocol):
    """Chooses the next action from query, analysis, tools, memory and turns left."""

    async def plan(self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str) -> Plan:
        """The plan for turn `memory.next_index`; `turns_left` counts that turn.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context or the memory its budget.
            EngineError: the engine failed.
        """
        ...


class Analyst(Protocol):
    """Analyses the query once, before the first turn."""

    async def analyse(self, query: Query, toolset: Toolset) -> str:
        """The analysis that planner, verifier and generator read.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context.
            EngineError: the engine failed.
        """
        ...


@dataclass(frozen=True)
class LLMPlanner:
    """A language model as planner.

    `compact` suits a small model without chat template: one line an action. `full` has sub-goals and multi-line
    contexts. `examples` are worked examples for the system prompt; `grammar` holds the text to the format, and `quoted`
    holds each argument to what question and results say (see `planner_grammar`).
    """

    engine: Engine
    format: Style = "full"
    examples: str = ""
    grammar: bool = True
    quoted: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    async def plan(self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str) -> Plan:
        """See `Planner.plan`."""
        sampling = replace(self.sampling, seed=request_seed(query.seed, "planner", memory.next_index))
        if self.format == "compact" and not self.grammar:
            sampling = replace(sampling, stop=(*sampling.stop, "\n"))
        quotable = _quotable(query, memory) if self.quoted else None
        grammar = planner_grammar(toolset, self.format, quotable) if self.grammar else None
        messages = self.messages(query, toolset, memory, turns_left, analysis)
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar))
        action, problem = parse_action(generation, self.format)
        return Plan(generation, action, problem)

    def messages(
        self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str
    ) -> tuple[Message, ...]:
        """The prompt, from what changes least to what changes most.

        System: instructions and tools, then examples. User: query and analysis, one part a turn, then the call to act.
        """
        sections = template(f"planner_{self.format}")
        compact = self.format == "compact"
        tools = "\n".join(_compact_tool(tool) if compact else _full_tool(tool) for tool in toolset)
        instructions = sections["system"].substitute(tools=tools) + "\n"
        examples = (self.examples.rstrip("\n") + "\n",) if self.examples else ()
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, self.format)
        tail = sections["last" if turns_left == 1 else "tail"]
        user = (
            query_part(query.text, analysis, single_line=compact),
            *turns,
            tail.substitute(turn=memory.next_index, turns_left=turns_left),
        )
        return Message("system", (instructions, *examples)), Message("user", user)


@dataclass(frozen=True)
class LLMAnalyst:
    """A language model that writes the query analysis as free text."""

    engine: Engine
    sampling: Sampling = field(default_factory=Sampling)

    async def analyse(self, query: Query, toolset: Toolset) -> str:
        """See `Analyst.analyse`."""
        sections = template("analyst")
        tools = "\n".join(_full_tool(tool) for tool in toolset)
        messages = (
            Message("system", (sections["system"].substitute(tools=tools) + "\n",)),
            Message("user", (query_part(query.text, ""), sections["tail"].substitute())),
        )
        sampling = replace(self.sampling, seed=request_seed(query.seed, "analyst", 0))
        return (await self.engine.generate(GenerateRequest(messages, sampling))).text.strip()


def parse_action(generation: Generation, format: Style) -> tuple[Action | None, str]:
    """The action that the text is, or None and the reason, which states the expected format.

    compact: `tool: context` or `finish`, one line, with at most one leading space (a prompt that ends in "Turn 2:"
    is continued by one). full: three fields in order; the context runs to the end, and is optional for `finish`.
    """
    text = generation.text
    if generation.finish_reason is FinishReason.LENGTH and not (format == "compact" and text.endswith("\n")):
        return None, f"the text was cut off by the token limit; {_EXPECTED[format]}"
    finish = (_COMPACT_FINISH if format == "compact" else _FULL_FINISH).fullmatch(text)
    if finish:
        fields = finish.groupdict()
        return Action(fields.get("sub_goal", ""), FINISH, (fields.get("context") or "").strip()), ""
    match = (_COMPACT if format == "compact" else _FULL).fullmatch(text)
    if match is None or match["tool"] == FINISH:
        return None, _EXPECTED[format]
    return Action(match.groupdict().get("sub_goal", ""), match["tool"], match["context"]), ""


def planner_grammar(toolset: Toolset, format: Style, quotable: str | None = None) -> str:
    """A Lark grammar (llguidance dialect) whose texts are the actions of `format` over the tools' names.

    A tool whose only parameter is a string with a simple `pattern` (a repeated character class, perhaps with words
    beside it: `^([0-9+ ]|sqrt){1,80}$`) takes that as its argument; any other argument is one line. `finish` takes
    none. The text ends in a line break, so no end token is drawn.

    With `quotable`, an argument is whole words in a row from one line of it; under a pattern that a number fits, as the
    calculator's, it may have any form the pattern allows, with numbers of `quotable` and at least one.
    """
    alternatives, terminals = [], []
    width = 60 if format == "compact" else 400
    joint = ": " if format == "compact" else "\nContext: "
    numbers = sorted(set(_NUMBER.findall(quotable or "")))
    for number, tool in enumerate(toolset):
        if tool.name == FINISH:
            alternatives.append(json.dumps(FINISH))
            continue
        pattern = _simple_pattern(tool)
        argument = f"/{pattern or _LINE % (width - 1)}/"
        if quotable is not None and pattern is not None and re.fullmatch(pattern, "7"):
            if not numbers:
                continue  # nothing to calculate with
            one = "(" + "|".join(re.escape(text) for text in numbers) + ")"
            argument += f" & /([^0-9.\\n]*{one}[^0-9.\\n]+)*[^0-9.\\n]*{one}[^0-9.\\n]*/"
        elif quotable is not None:
            argument += f" & QUOTE & /[^{_EDGE}]([^\\r\\n]{{0,{width - 2}}}[^{_EDGE}])?/"
        alternatives.append(f"{json.dumps(tool.name + joint)} ARGUMENT_{number}")
        terminals.append(f"ARGUMENT_{number}: {argument}")
    if quotable is not None:
        terminals.append(f"QUOTE: %regex {json.dumps({'substring_words': quotable})}")
    if format == "compact":
        start = 'start: " " call "\\n"'
    else:
        start = 'start: "Sub-goal: " SUB_GOAL "\\nTool: " call "\\n"'
        terminals.append(f"SUB_GOAL: /{_LINE % 119}/")
    return "\n".join([start, "call: " + " | ".join(alternatives), *terminals]) + "\n"


def _quotable(query: Query, memory: Memory) -> str:
    """The question and the results so far, a line each."""
    results = (turn.result.text for turn in memory.turns if turn.result.error is None)
    return "\n".join(one_line(text)[:_QUOTABLE_CHARACTERS] for text in (query.text, *results))


def _simple_pattern(tool: Tool) -> str | None:
    """The pattern of a tool's only parameter as the inside of a Lark regex, if it is one llguidance reads."""
    properties = tool.parameters.get("properties", {})
    if len(properties) == 1:
        (schema,) = properties.values()
        simple = _SIMPLE_PATTERN.fullmatch(schema.get("pattern", "")) if schema.get("type") == "string" else None
        if simple:
            return re.sub(r"\\.|/", lambda piece: "\\/" if piece[0] == "/" else piece[0], simple[1])
    return None


def _compact_tool(tool: Tool) -> str:
    return f"{tool.name}: {one_line(tool.description)}"


def _full_tool(tool: Tool) -> str:
    return f"- {tool.name}: {one_line(tool.description)}\n  parameters: {json.dumps(tool.parameters, sort_keys=True)}"
