"""`midflight tools`: what there is and what it lacks, and one call of one tool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from midflight.building import Closable, context_of, tool_engine
from midflight.engines.base import Engine
from midflight.errors import UserError, did_you_mean
from midflight.progress import Progress
from midflight.recipe import Recipe, load_recipe
from midflight.rendering import printable
from midflight.slips import may_be_secret, place_in, unquoted
from midflight.tools import (
    BUILTIN,
    FINISH,
    Scope,
    Tool,
    ToolResult,
    Toolset,
    make_toolset,
    options_of,
    recipe_tool_info,
    tool_info,
)
from midflight.tools.base import argument_schema, call_tool, one_line
from midflight.tools.own import is_own, load_own


def listing(recipe: str | None = None) -> str:
    """Every built-in tool, or every one of a recipe, with its parameters, what it does, and what to do first.

    Raises:
        UserError: the recipe is wrong.
    """
    if recipe is None:
        infos = tool_info()
    else:
        agent = load_recipe(recipe, tasks=False, training=False).agent
        infos = recipe_tool_info(agent.tools, agent.tool_options, agent.mcp_servers, agent.sandbox)
    lines = []
    for info in infos:
        lines.append(f"{info.name}({', '.join(info.parameters.get('properties', {}))})")
        lines.append(f"    {info.description}")
        lines += [f"    missing: {info.missing}"] if info.missing else []
    return "\n".join(map(printable, lines))


def try_tool(
    name: str, arguments: Sequence[str], options: Sequence[str], recipe: str | None, seconds: float
) -> ToolResult:
    """Call one tool once, as in a trajectory of its own.

    Args:
        name: of a built-in tool, one of the recipe, or a place such as `file.py:attribute`.
        arguments: `key=value`; a value is text where the tool's schema takes it as that, else YAML.
        options: `key=value` of the tool's options, over those of the recipe.
        recipe: whose options, own tools, MCP servers, sandbox and engines are used.

    Raises:
        UserError: no such tool, wrong arguments or options, or something is missing.
        InfrastructureError: a service that the tool needs does not answer.
    """
    toolset, closing = _toolset(name, options, recipe)
    own = load_own(name).name if is_own(name) else name
    try:
        tool = toolset.get(own)
        if tool is None or own == FINISH:
            raise UserError(f"{name}: no such tool; there are: {', '.join((*toolset.names[:-1], *BUILTIN))}")
        values = dict(_value(tool, *pair) for pair in _pairs(arguments))
        reason = toolset.validate(own, values)
        if reason is not None:
            described = ", ".join(tool.parameters.get("properties", {}))
            raise UserError(f"{name}: {reason}; write key=value for: {described or 'nothing, it takes none'}")
        return asyncio.run(_call(toolset, own, values, seconds))
    finally:
        toolset.close()
        for engine in closing:
            engine.close()


def shown(result: ToolResult) -> str:
    """The text of a result, safe for a terminal."""
    return "\n".join(printable(line) for line in result.text.splitlines())


def _toolset(name: str, options: Sequence[str], recipe: str | None) -> tuple[Toolset, Sequence[Closable]]:
    """The toolset that has the tool, and engines to close; with a recipe, only what of it is needed is made."""
    given: dict[str, Any] = {}
    loaded: Recipe | None = None
    servers: dict[str, Any] = {}
    names = [name]
    if recipe is not None:
        loaded = load_recipe(recipe, tasks=False, training=False)
        agent = loaded.agent
        given = dict(agent.tool_options)
        server = name.partition(".")[0]
        if server in agent.mcp_servers:
            names, servers = [], {server: agent.mcp_servers[server]}
        for place in filter(is_own, agent.tools):
            names = [place if one == load_own(place).name else one for one in names]
    if names and names[0] not in BUILTIN and not is_own(names[0]):
        known = [*BUILTIN, *(_of_recipe(loaded) if loaded is not None else ())]
        raise UserError(f"{name}: no such tool; {did_you_mean(name, known)}there are: {', '.join(known)}")
    key = load_own(names[0]).name if names and is_own(names[0]) else name
    for one, value in _pairs(options):
        given[key] = {**given.get(key, {}), one: _yaml(one, value)}
    engines: dict[str | None, Engine] = {}
    closing: list[Closable] = []
    try:
        if names and names[0] in BUILTIN and (asked := options_of(name, given).engines):
            if loaded is None:
                raise UserError(f"{name}: asks a language model; name a recipe that has one with --recipe")
            default = loaded.agent.tools_engine
            for engine_name in sorted({default if one is None else one for one in asked}, key=str):
                engines[engine_name], opened = tool_engine(loaded, engine_name, Progress().note)
                closing += opened
        context = None if loaded is None else context_of(loaded, engines.get)
        return make_toolset(names, {key: given[key]} if key in given else {}, context, servers=servers), closing
    except BaseException:
        for engine in closing:
            engine.close()
        raise


def _of_recipe(recipe: Recipe) -> list[str]:
    """The tools of a recipe that are not built in, by the names that they are run by; of a server that is not asked."""
    own = [load_own(place).name for place in filter(is_own, recipe.agent.tools)]
    return [*own, *(f"{server}.TOOL" for server in recipe.agent.mcp_servers)]


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{place_in(text) or '...'}: write key=value, with no spaces around '='")
        if key in found:
            raise UserError(f"{_given(key, value)}: {key} is given twice; leave one out")
        found[key] = value
    return list(found.items())


def _value(tool: Tool, key: str, text: str) -> tuple[str, Any]:
    schema = argument_schema(tool, key)
    if schema.get("type") == "string":
        return key, text
    validator = Draft202012Validator(tool.parameters, registry=EMPTY_REGISTRY)
    try:
        return key, text if not any(validator.descend(text, schema)) else _yaml(key, text)
    except (Unresolvable, RecursionError):
        return key, text  # the toolset says what is wrong with the schema


def _yaml(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        reason = error.problem
    except RecursionError:
        reason = "nested too deeply"
    except (yaml.YAMLError, ValueError) as error:  # such as the date 2024-99-99
        reason = one_line(str(error))
    raise UserError(f"{_given(key, text)}: not YAML ({unquoted(reason)}); quote it")


def _given(key: str, value: str) -> str:
    return f"{key}=..." if may_be_secret(key, value) else f"{key}={one_line(value)}"


async def _call(toolset: Toolset, name: str, arguments: dict[str, Any], seconds: float) -> ToolResult:
    async with Scope() as scope:
        tool = toolset.scoped(scope).get(name)
        assert tool is not None, "it was looked up before"
        return await call_tool(tool, arguments, seconds)
