"""Print docs/tools.md: every tool with its parameters and options, from the tools and the docstrings of their options.

Usage: python scripts/tools_reference.py > docs/tools.md
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from recipe_reference import Docstrings, _cell, _default, _type

from midflight.sandbox.imagined import Imagined
from midflight.tools import BUILTIN, tool_info
from midflight.tools.mcp import McpServer
from midflight.tools.options import ToolOptions
from midflight.tools.web.http import WebOptions

HEAD = Path(__file__).with_name("tools_head.md")
"""What stands before the tables."""


def reference() -> str:
    """The whole page."""
    models = [builtin.options_model for builtin in BUILTIN.values()] + [McpServer]
    files = {inspect.getfile(base) for model in models for base in model.__mro__ if issubclass(base, ToolOptions)}
    docstrings = Docstrings("\n".join(Path(file).read_text(encoding="utf-8") for file in sorted(files)))
    parts = [HEAD.read_text(encoding="utf-8").rstrip("\n"), ""]
    parts += ["### Limits of every tool", "", *_table(ToolOptions, [*ToolOptions.model_fields], docstrings), ""]
    own = [name for name in WebOptions.model_fields if name not in ToolOptions.model_fields]
    parts += ["### Options of every tool that speaks to the network", "", *_table(WebOptions, own, docstrings), ""]
    parts += ["## Tools", ""]
    infos = {info.name: info for info in tool_info(Imagined)}
    for name, builtin in BUILTIN.items():
        info, model = infos[name], builtin.options_model
        required = info.parameters.get("required", [])
        shown = ", ".join(key if key in required else f"[{key}]" for key in info.parameters["properties"])
        parts += [f"### `{name}({shown})`", "", _sentence(info.description)]
        if builtin.extra:
            parts.append(f"Needs `pip install 'midflight[{builtin.extra}]'`.")
        if issubclass(model, WebOptions):
            parts.append("Speaks to the network.")
        if model.model_construct().engines:
            parts.append("Asks a language model.")
        if not model.cacheable:
            parts.append("Cannot be cached.")
        changed = _changed_limits(model)
        if changed:
            parts.append(f"Limits: {changed}.")
        fields = [field for field in model.model_fields if field not in (*ToolOptions.model_fields, *own)]
        parts += ["", *(_table(model, fields, docstrings) + [""] if fields else [])]
    parts += ["## MCP servers", "", "Keys of an entry of `agent.mcp_servers`, beside the limits:", ""]
    fields = [field for field in McpServer.model_fields if field not in ToolOptions.model_fields]
    parts += [*_table(McpServer, fields, docstrings), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _table(model: type[ToolOptions], fields: list[str], docstrings: Docstrings) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in fields:
        meaning = docstrings.of(model, name)
        if not meaning:
            raise SystemExit(f"{inspect.getfile(model)}: {model.__name__}.{name} has no docstring below it")
        field = model.model_fields[name]
        default = '`""`' if field.default == "" else _default(field, name, None)
        lines.append(f"| `{name}` | {_type(field)} | {default} | {_cell(meaning)} |")
    return lines


def _changed_limits(model: type[ToolOptions]) -> str:
    changed = {name: model.model_fields[name].default for name in ToolOptions.model_fields}
    common = {name: field.default for name, field in ToolOptions.model_fields.items()}
    return ", ".join(f"`{name}` {value:g}" for name, value in changed.items() if value != common[name])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(reference())
