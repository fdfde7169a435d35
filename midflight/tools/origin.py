"""What makes a tool the one that it is, for the cache of results: its code, and the settings and data that it holds.

Invariant: two tools of one origin give the same answers, as far as their files and what they hold tell; what they read
elsewhere (another module, the environment, the network) is not seen. What cannot be told apart is refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Mapping
from enum import Enum
from inspect import ismemberdescriptor
from pathlib import Path, PurePath
from types import CellType, FunctionType, MethodType
from typing import Any

from midflight.errors import UserError
from midflight.tools.base import Tool
from midflight.tools.function import FunctionTool
from midflight.tools.hiding import HidingTool

_PROCESS = uuid.uuid4().hex


def code_of(tool: Tool) -> list[str]:
    """Where a tool's code is, and the hash of that file; of code without a file, what no other process has."""
    tool = tool.tool if isinstance(tool, HidingTool) else tool
    return _code(tool.function if isinstance(tool, FunctionTool) else type(tool))


def state_of(tool: Tool, key: str) -> str:
    """What a tool of the user's own holds beside its code, as JSON: its attribute `cache_state` where it has one.

    Else it is what a function got from the one that it is made in, or the attributes of an object.

    Args:
        key: the option that needs it, with its value.

    Raises:
        UserError: it holds something that is no plain value.
    """
    tool = tool.tool if isinstance(tool, HidingTool) else tool
    if hasattr(tool, "cache_state"):
        held = [("cache_state", tool.cache_state)]
    elif isinstance(tool, FunctionTool):
        held = _held(tool.function)
    else:
        held = _attributes(tool)
    plain = []
    for name, value in held:
        try:
            plain.append([name, _plain(value, frozenset())])
        except TypeError as error:
            raise UserError(
                f"{key}: {tool.name} holds {name} of type {error}, which does not tell what the answers depend on; "
                "give the tool an attribute cache_state that does (JSON), or leave it out"
            ) from None
    return json.dumps(plain, sort_keys=True)


def _code(code: Any) -> list[str]:
    module, name = str(code.__module__), str(code.__qualname__)
    if isinstance(code, FunctionType):  # a file may have several of one name
        name = f"{name} {hashlib.sha256(repr([*code.__code__.co_positions()]).encode()).hexdigest()}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return [module, name, _PROCESS]
    return [module, name, hashlib.sha256(Path(file).read_bytes()).hexdigest()]


def _attributes(holder: object) -> list[tuple[str, Any]]:
    if isinstance(holder, type):
        return []
    slots = {name for kind in type(holder).__mro__ for name, one in vars(kind).items() if ismemberdescriptor(one)}
    held = {name: getattr(holder, name) for name in slots if hasattr(holder, name)}
    return sorted((held | getattr(holder, "__dict__", {})).items())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _held(function: Any) -> list[tuple[str, Any]]:
    """What a function got when it was made, by name; one at the top of a module got what its file says."""
    held: list[tuple[str, Any]] = []
    while function is not None:
        if isinstance(function, MethodType):
            held += _attributes(function.__self__)
            function = function.__func__
        if isinstance(function, FunctionType):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            held += [(name, _contents(cell)) for name, cell in cells]
            if "<locals>" in function.__qualname__:
                held += [(str(number), value) for number, value in enumerate(function.__defaults__ or ())]
                held += sorted((function.__kwdefaults__ or {}).items())
        function = getattr(function, "__wrapped__", None)
    return held


def _plain(value: Any, within: frozenset[int]) -> Any:
    """A value as JSON; functions and classes by their code.

    Raises:
        TypeError: it is something else, whose type is the message.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if id(value) in within:  # a function that calls itself
        return None
    within |= {id(value)}
    if isinstance(value, list | tuple):
        return [_plain(item, within) for item in value]
    if isinstance(value, Mapping):
        return [[_plain(name, within), _plain(item, within)] for name, item in value.items()]
    if isinstance(value, FunctionType | MethodType):
        return [*_code(value), [[name, _plain(item, within)] for name, item in _held(value)]]
    if isinstance(value, type):
        return _code(value)
    if isinstance(value, Enum):
        return [*_code(type(value)), value.name]
    raise TypeError(type(value).__name__)
