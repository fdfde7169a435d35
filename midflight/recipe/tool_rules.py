"""Rules of a recipe's tools: which there are, their options, and MCP servers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from midflight.errors import UserError, did_you_mean
from midflight.recipe.config import IdleKey, Recipe, RecipeError
from midflight.recipe.validating import show
from midflight.sandbox.options import SandboxOptions
from midflight.sandbox.workspace import StartFiles, keep_problem
from midflight.tools import BUILTIN, ToolOptions, read_options
from midflight.tools.mcp import McpServer
from midflight.tools.own import is_own, load_own


def check_tools(recipe: Recipe, given: Collection[str], known: Collection[str]) -> None:
    """Refuse tools that do not exist, twice the same, and options that are wrong or belong to none of them.

    Args:
        recipe: its `agent.tools` and `agent.tool_options`; loading tools of the user's own runs their modules.
        given: names of tools that the caller passes as objects.
        known: names of the built-in ones.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    names = list(recipe.agent.tools)
    key = f"agent.tools = {show(names)}"
    for place, name in enumerate(names):
        if name == "finish":
            raise RecipeError(f"{key}: finish is always there; remove it")
        if name in names[:place]:
            raise RecipeError(f"{key}: {name} is listed twice; remove one")
        if name not in known and name not in given and not is_own(name):
            hint = did_you_mean(name, [*known, *given])
            raise RecipeError(f"{key}: unknown tool {name}; {hint}tools that exist: {', '.join(sorted(known))}")
    try:
        called = [load_own(name).name if is_own(name) else name for name in names]
        if len(set(called)) < len(called):
            raise RecipeError(f"{key}: two of them have one name; rename one")
        for name in recipe.agent.tool_options:
            if name not in called:
                hint = did_you_mean(name, called)
                raise IdleKey(
                    f"agent.tool_options.{name}",
                    f"agent.tool_options.{name}: agent.tools does not have it",
                    f"{hint}add it there, or leave this out",
                )
        for name, short in zip(names, called, strict=True):
            own = is_own(name) or name in given or name not in BUILTIN
            model = ToolOptions if own else BUILTIN[name].options_model
            data = recipe.agent.tool_options.get(short, {})
            options = read_options(model, data, f"agent.tool_options.{short}")
            for option in ("engine", "embeddings"):
                _check_engine(recipe, f"agent.tool_options.{short}.{option}", getattr(options, option, None), option)
    except RecipeError:
        raise
    except UserError as error:
        raise RecipeError(str(error)) from error


def _check_engine(recipe: Recipe, key: str, name: str | None, option: str) -> None:
    """Refuse an engine that a tool names and that is not there, or not of the kind it takes.

    Raises:
        RecipeError: so it is.
    """
    if name is None:
        return
    if name not in recipe.engines:
        hint, known = did_you_mean(name, recipe.engines), ", ".join(recipe.engines) or "none"
        raise RecipeError(f"{key} = {name}: no such engine; {hint}engines of this recipe: {known}")
    embeds = recipe.engines[name].api == "embeddings"
    if embeds and option == "engine":
        raise RecipeError(f"{key} = {name}: engines.{name}.api = embeddings writes no text; name another engine")
    if not embeds and option == "embeddings":
        raise RecipeError(f"{key} = {name}: gives no vectors; name an engine with api: embeddings")


def check_sandbox(recipe: Recipe) -> None:
    """Refuse settings of the sandbox that do nothing, and folders that a workspace cannot begin with or be kept in.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    options = recipe.agent.sandbox
    sandboxed = [name for name, builtin in BUILTIN.items() if builtin.sandboxed]
    if options != SandboxOptions() and not set(sandboxed) & set(recipe.agent.tools):
        raise IdleKey(
            "agent.sandbox", f"agent.sandbox: does nothing without one of the tools {', '.join(sandboxed)}", "remove it"
        )
    if options.files is not None and not os.path.isdir(options.files):
        raise RecipeError(f"agent.sandbox.files = {options.files}: no such folder; name one, or leave it out")
    if options.files is not None and (problem := StartFiles(Path(options.files)).problem(options)):
        raise RecipeError(f"agent.sandbox.files = {options.files}: {problem}")
    if options.keep is not None and (problem := keep_problem(Path(options.keep))):
        raise RecipeError(f"agent.sandbox.keep = {show(options.keep)}: {problem}")


def check_servers(recipe: Recipe) -> None:
    """Refuse MCP servers whose keys are wrong; none is started.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    if not recipe.agent.tools and not recipe.agent.mcp_servers:
        raise RecipeError("agent.tools = []: there is nothing to choose; name a tool, or give agent.mcp_servers")
    for name, given in recipe.agent.mcp_servers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", name):
            raise RecipeError(f"agent.mcp_servers.{name}: name it with 1 to 32 letters, digits, '_' or '-'")
        try:
            read_options(McpServer, given, f"agent.mcp_servers.{name}")
        except UserError as error:
            raise RecipeError(str(error)) from error


def tool_engines(recipe: Recipe) -> set[str | None]:
    """The engines that tools ask, by name; None is the recipe's model, before training."""
    given = recipe.agent.tool_options
    models = {name: BUILTIN[name].options_model for name in recipe.agent.tools if name in BUILTIN}
    # Not validated again: a tool that the caller passes as an object may have the name of a built-in one.
    made = (model.model_construct(**given.get(name, {})) for name, model in models.items())
    asked = {engine for options in made for engine in options.engines}
    return {recipe.agent.tools_engine if engine is None else engine for engine in asked}


def has_frozen_models(recipe: Recipe) -> bool:
    """Whether anything beside the planner asks the recipe's model: another module, or a tool."""
    return recipe.agent.has_frozen_models or None in tool_engines(recipe)
