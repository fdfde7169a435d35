"""Tools of the user's own, by their place: `package.module:attribute` or `file.py:attribute`.

Invariant: a name with a colon is a place, any other a built-in tool. Loading runs the module's code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from midflight.errors import UserError
from midflight.tools.base import Tool

_FILE = "midflight_own:"
"""What the name of a module in a file starts with."""


def is_own(name: str) -> bool:
    """Whether a name in `agent.tools` is a place."""
    return ":" in name


def is_file(place: str) -> bool:
    """Whether a place is in a file rather than in a module that can be imported."""
    return place.rpartition(":")[0].endswith(".py")


def load_own(place: str) -> Tool:
    """The tool at `place`.

    Raises:
        UserError: no such file, module or attribute; its code fails; or what is there is no tool.
    """
    where, _, attribute = place.rpartition(":")
    key = f"agent.tools: {place}"
    if not where or not attribute:
        raise UserError(f"{key}: write package.module:attribute or file.py:attribute")
    if is_file(place) and not Path(where).is_file():
        raise UserError(f"{key}: no such file; paths are relative to the recipe")
    try:
        module = load_module(f"{_FILE}{Path(where).resolve()}" if is_file(place) else where)
    except Exception as error:  # the boundary to a user's code, which may raise anything
        raise UserError(f"{key}: cannot be loaded ({type(error).__name__}: {error})") from error
    found = getattr(module, attribute, None)
    if found is None:
        tools = [name for name, value in vars(module).items() if _is_tool(value)]
        raise UserError(f"{key}: {where} has no {attribute}; tools there: {', '.join(tools) or 'none'}")
    if not _is_tool(found):
        hint = "; decorate it with @tool" if callable(found) else ""
        raise UserError(f"{key}: not a tool but {type(found).__name__}{hint}")
    return found  # type: ignore[no-any-return]


def _is_tool(value: object) -> bool:
    parts = ("name", "description", "parameters", "call")
    return not isinstance(value, type) and all(hasattr(value, part) for part in parts)


def load_module(name: str) -> ModuleType:
    """A module by its name, which for one in a file is `_FILE` and the path; loaded once."""
    if name in sys.modules or not name.startswith(_FILE):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, name.removeprefix(_FILE))
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
