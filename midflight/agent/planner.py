"""The planner chooses the next action; it is the module that training changes.

Invariant: the planner's text is either exactly the agreed format or no action at all. Nothing is repaired by guessing,
and the prompt of turn t+1 repeats the parts of turn t's up to its last part, so their ids are shared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from string import Template
from typing import TYPE_CHECKING, Protocol

from midflight.agent.actions import action_schema, parse_action, parse_json_action, planner_grammar
from midflight.agent.examples import worked_examples
from midflight.agent.memory import Memory, Style
from midflight.agent.prompting import one_line, query_part, request_seed, template
from midflight.agent.types import Action, Query
from midflight.engines.base import Engine, GenerateRequest, Generation, Message, Sampling, Structure, structure_of
from midflight.engines.thoughts import said
from midflight.records import record

if TYPE_CHECKING:
    from midflight.tools.base import Tool, Toolset

__all__ = ["Analyst", "LLMAnalyst", "LLMPlanner", "Plan", "Planner"]


@record
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
    contexts. `examples` are worked examples for the system prompt, of which `nearest_examples` keeps those most like
    the question. `grammar` holds the text to the format. With `grounded` a context may name the result of turn n as
    `#n`, and the grammar holds contexts to such names and the question's words; `AgentFlow` has to be grounded too.
    `direct` tells a planner in the full format that a context is the argument, as `DirectExecutor` takes it.
    """

    engine: Engine
    format: Style = "full"
    examples: str = ""
    nearest_examples: int | None = None
    grammar: bool = True
    grounded: bool = False
    direct: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    prompt: str = ""

    async def plan(self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str) -> Plan:
        """See `Planner.plan`."""
        generation = await self.engine.generate(self.request(query, toolset, memory, turns_left, analysis))
        action, problem = parse_json_action(generation) if self._json else parse_action(generation, self.format)
        return Plan(generation, action, problem)

    def request(
        self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str
    ) -> GenerateRequest:
        """What `plan` asks its engine for.

        Raises:
            PromptTooLong: the memory exceeds its budget.
        """
        sampling = self.sampling.seeded(request_seed(query.seed, "planner", memory.next_index))
        structure = self._structure
        grammar = schema = None
        if structure == "grammar":
            question = one_line(query.text) if self.grounded else None
            grammar = planner_grammar(toolset, self.format, question, memory.turns)
        elif self.format == "compact":
            sampling = replace(sampling, stop=(*sampling.stop, "\n"))
        elif structure == "json":
            schema = action_schema(toolset)
        return GenerateRequest(self.messages(query, toolset, memory, turns_left, analysis), sampling, grammar, schema)

    @cached_property
    def _structure(self) -> Structure:
        """How the engine holds the text to the format; as JSON there is an action for the full format alone."""
        return structure_of(self.engine) if self.grammar else "text"

    @cached_property
    def _json(self) -> bool:
        return self.format == "full" and self._structure == "json"

    def messages(
        self, query: Query, toolset: Toolset, memory: Memory, turns_left: int, analysis: str
    ) -> tuple[Message, ...]:
        """The prompt, from what changes least to what changes most.

        System: instructions and tools, then examples. User: query and analysis, one part a turn, then the call to act.
        """
        sections = template(f"planner_{self.format}", self.prompt)
        shown = self.examples
        if self.nearest_examples is not None:
            shown = worked_examples(shown).nearest(query.text, self.nearest_examples)
        examples = (shown.rstrip("\n") + "\n",) if shown else ()
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, self.format)
        user = (
            query_part(query.text, analysis, single_line=self.format == "compact"),
            *turns,
            _call_to_act(sections["last" if turns_left == 1 else "tail"], memory.next_index, turns_left),
        )
        return Message("system", (self._instructions(toolset), *examples)), Message("user", user)

    def _instructions(self, toolset: Toolset) -> str:
        """With the tools; kept, for they are long, and every turn begins with them."""
        key = ("planner", self.format, self._json, self.grounded, self.direct, self.prompt)
        if key not in toolset.texts:
            compact = self.format == "compact"
            sections = template(f"planner_{self.format}", self.prompt)
            tools = "\n".join(_compact_tool(tool) if compact else _full_tool(tool) for tool in toolset)
            references = sections["references"].substitute() + "\n" if self.grounded else ""
            filled = {"tools": tools, "references": references}
            if not compact:
                filled["format"] = sections["json" if self._json else "format"].substitute()
                filled["context"] = sections["direct" if self.direct else "context"].substitute()
            toolset.texts[key] = sections["system"].substitute(filled) + "\n"
        return toolset.texts[key]


@dataclass(frozen=True)
class LLMAnalyst:
    """A language model that writes the query analysis as free text; see also `said`."""

    engine: Engine
    sampling: Sampling = field(default_factory=Sampling)
    prompt: str = ""

    async def analyse(self, query: Query, toolset: Toolset) -> str:
        """See `Analyst.analyse`."""
        sections = template("analyst", self.prompt)
        tools = "\n".join(_full_tool(tool) for tool in toolset)
        messages = (
            Message("system", (sections["system"].substitute(tools=tools) + "\n",)),
            Message("user", (query_part(query.text, ""), sections["tail"].substitute())),
        )
        sampling = self.sampling.seeded(request_seed(query.seed, "analyst", 0))
        return said((await self.engine.generate(GenerateRequest(messages, sampling))).text).strip()


@lru_cache(maxsize=1024)
def _call_to_act(section: Template, turn: int, turns_left: int) -> str:
    return section.substitute(turn=turn, turns_left=turns_left)


def _compact_tool(tool: Tool) -> str:
    return f"{tool.name}: {one_line(tool.description)}"


def _full_tool(tool: Tool) -> str:
    return f"- {tool.name}: {one_line(tool.description)}\n  parameters: {json.dumps(tool.parameters, sort_keys=True)}"
