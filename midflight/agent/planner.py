"""The planner: chooses the next action. Its tokens are the ones that train.

Invariant: the prompt of turn t+1 repeats the parts of turn t's prompt up to its last part, so their ids repeat too; and
a text that is not exactly an action is never repaired by guessing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from midflight.agent.memory import Memory
from midflight.agent.prompts import fill, template
from midflight.agent.types import Action, Generation, Query
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Message, Sampling
from midflight.seeds import derive
from midflight.tools.base import FINISH, Tool, Toolset

Format = Literal["compact", "full"]

_CONTEXT = r"/[^\n ][^\n]{0,79}/"
_FULL = re.compile(r"Sub-goal: ?(?P<goal>[^\n]*)\nTool: ?(?P<tool>[^\n]*)(?:\nContext: ?(?P<context>.*))?", re.DOTALL)
_EXPECTED = {
    "compact": "expected one line `tool: context`, or `finish`",
    "full": "expected three lines `Sub-goal: ...`, `Tool: ...`, `Context: ...`",
}


@dataclass(frozen=True)
class Plan:
    """What the planner gave. `action` is None when its text was no action; `problem` then says what was expected."""

    generation: Generation
    action: Action | None
    problem: str = ""


class Planner(Protocol):
    """Chooses the next action from query, tools and memory."""

    async def plan(self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str) -> Plan:
        """Raises PromptTooLong or EngineError; a bad text is a `Plan` without an action."""
        ...


@dataclass(frozen=True)
class LLMPlanner:
    """A language model as planner. `examples` is text put after the tools; `grammar` holds the text to the format."""

    engine: Engine
    format: Format = "full"
    examples: str = ""
    grammar: bool = True
    sampling: Sampling = Sampling()
    memory_tokens: int = 512

    def prompt(
        self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str
    ) -> tuple[Message, ...]:
        """The messages of this turn, parts ordered from what changes least to what changes most."""
        turn = len(memory.turns) + 1
        system = fill(template(f"planner_{self.format}"), tools=tool_list(toolset))
        parts = [f"Question: {query.text}\n" + (f"Analysis: {analysis}\n" if analysis else "")]
        parts += memory.parts(self.memory_tokens, self.engine.count_tokens, self.format)
        last = " (last turn)" if turns_left == 1 else ""
        if self.format == "compact":
            parts.append(f"Turn {turn}{last}:")
        else:
            parts.append(f"Turn {turn} of {turn + turns_left - 1}{last}. Write the next action.")
        examples = (self.examples.rstrip("\n") + "\n\n",) if self.examples else ()
        return Message("system", (system, *examples)), Message("user", tuple(parts))

    async def plan(self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str) -> Plan:
        turn = len(memory.turns) + 1
        seed = None if query.seed is None else derive(query.seed, "planner", turn)
        generation = await self.engine.generate(
            GenerateRequest(
                messages=self.prompt(query, toolset, memory, turns_left, analysis),
                sampling=replace(self.sampling, seed=seed),
                grammar=planner_grammar(toolset, self.format) if self.grammar else None,
            )
        )
        if generation.finish_reason is FinishReason.LENGTH:
            limit = self.sampling.max_tokens
            return Plan(generation, None, f"the action was longer than {limit} tokens; {_EXPECTED[self.format]}")
        action = parse_action(generation.text, self.format)
        return Plan(generation, action, "" if action else _EXPECTED[self.format])


def parse_action(text: str, format: Format) -> Action | None:
    """The action that `text` is, or None. The tool's name is not checked: an unknown one is the executor's error."""
    text = text.strip()
    if format == "compact":
        if "\n" in text or not text:
            return None
        if text == FINISH:
            return Action("", FINISH, "")
        tool, colon, context = text.partition(": ")
        return Action("", tool.strip(), context.strip()) if colon and tool.strip() and context.strip() else None
    match = _FULL.fullmatch(text)
    if match is None or not match["tool"].strip():
        return None
    tool, context = match["tool"].strip(), match["context"]
    if context is None and tool != FINISH:
        return None
    return Action(match["goal"].strip(), tool, (context or "").strip())


def planner_grammar(toolset: Toolset, format: Format) -> str:
    """A Lark grammar (llguidance) whose texts all parse to an action with a tool of `toolset`."""
    if format == "compact":
        calls = [f'" {FINISH}"' if tool.name == FINISH else f'" {tool.name}: " {_argument(tool)}' for tool in toolset]
        return 'start: call "\\n"\ncall: ' + " | ".join(calls) + "\n"
    calls = [
        f'"{FINISH}\\n"' if tool.name == FINISH else f'"{tool.name}\\nContext: " {_argument(tool)} "\\n"'
        for tool in toolset
    ]
    return 'start: "Sub-goal: " GOAL "\\nTool: " call\nGOAL: /[^\\n ][^\\n]{0,119}/\ncall: ' + " | ".join(calls) + "\n"


def _argument(tool: Tool) -> str:
    """The pattern of a tool's only parameter when its schema has one, any line otherwise."""
    properties = list(tool.parameters.get("properties", {}).values())
    pattern = properties[0].get("pattern") if len(properties) == 1 else None
    if not isinstance(pattern, str):
        return _CONTEXT
    return "/" + pattern.removeprefix("^").removesuffix("$").replace("/", r"\/") + "/"


def tool_list(toolset: Toolset) -> str:
    """One line a tool: its name and what it does."""
    return "".join(f"{tool.name}: {' '.join(tool.description.split())}\n" for tool in toolset)
