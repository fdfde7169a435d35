"""Print docs/recipe.md: every key of a recipe, from the models of a recipe and the docstrings below their fields.

Usage: python scripts/recipe_reference.py > docs/recipe.md
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from midflight.engines import config as engine_config
from midflight.recipe import config
from midflight.sandbox import options

HEAD = """\
# Recipe keys

A recipe is YAML with these keys; on the command line a key is changed by its path: `training.steps=10`. Files and
folders are relative to the recipe that names them, on the command line to the folder you are in. What is not given has
its default. The [shipped recipes](../recipes) give many keys; `midflight train RECIPE --dry-run` prints a
recipe with all of them.

This page is made by `scripts/recipe_reference.py` from `midflight/recipe/config.py`, `midflight/engines/config.py` and
`midflight/sandbox/options.py`.
"""
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false"}
BOUNDS = (("ge", ">= {}"), ("gt", "> {}"), ("le", "<= {}"), ("lt", "< {}"), ("min_length", "{} or more"))


class Docstrings:
    """What stands below the classes and the fields of modules."""

    def __init__(self, *sources: str) -> None:
        self.classes: dict[str, str] = {}
        self._fields: dict[tuple[str, str], str] = {}
        for node in [node for source in sources for node in ast.parse(source).body]:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = ast.get_docstring(node) or ""
                for field, below in zip(node.body, node.body[1:], strict=False):
                    match field, below:
                        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                            self._fields[node.name, name] = text

    def of(self, model: type[BaseModel], field: str) -> str:
        """Of a field, or of the one it overrides; empty where there is none."""
        return next(
            (self._fields[at.__name__, field] for at in model.__mro__ if (at.__name__, field) in self._fields), ""
        )


@dataclass(frozen=True)
class Section:
    """One section of the recipe: its dotted path, model, default (None: none) and what its own field says of it."""

    path: str
    model: type[BaseModel]
    default: BaseModel | None
    about: str

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def reference() -> str:
    """The whole page.

    Raises:
        SystemExit: a field has no docstring.
    """
    docstrings = Docstrings(
        *(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (config, engine_config, options))
    )
    parts = [HEAD]
    for section in sections(Section("", config.Recipe, None, ""), docstrings):
        parts.append(f"## {f'`{section.path}`' if section.path else 'The recipe itself'}\n")
        parts.append(_cell(f"{docstrings.classes[section.model.__name__]} {section.about}") + "\n")
        parts += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model.model_fields.items():
            if _below(field) is None:
                meaning = docstrings.of(section.model, name)
                if not meaning:
                    raise SystemExit(
                        f"{section.model.__module__}: {section.model.__name__}.{name} has no docstring below it"
                    )
                cells = (f"`{section.key(name)}`", _type(field), _default(field, name, section.default), _cell(meaning))
                parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


def sections(section: Section, docstrings: Docstrings) -> Iterator[Section]:
    """The section and all below it."""
    yield section
    for name, field in section.model.model_fields.items():
        model = _below(field)
        if model is not None:
            default = field.default if section.default is None else getattr(section.default, name)
            about = docstrings.of(section.model, name) + (" The default is null." if default is None else "")
            known = default if isinstance(default, model) else None
            key = section.key(name) + (".NAME" if typing.get_origin(field.annotation) is dict else "")
            yield from sections(Section(key, model, known, about), docstrings)


def _below(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _type(field: FieldInfo) -> str:
    bounds = [
        words.format(f"{bound:g}" if isinstance(bound, float) else bound)
        for part in field.metadata
        for name, words in BOUNDS
        if (bound := getattr(part, name, None)) is not None
    ]
    kinds = [kind for kind in typing.get_args(field.annotation) or (field.annotation,) if kind is not types.NoneType]
    optional = types.NoneType in typing.get_args(field.annotation)
    named = _named(kinds[0] if optional else field.annotation)
    return ", ".join([named, *bounds]) + (", or null" if optional else "")


def _named(annotation: Any) -> str:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if typing.get_origin(annotation) is typing.Annotated:
        return _named(parts[0])
    if typing.get_origin(annotation) is dict:
        return "section"
    if typing.get_origin(annotation) is tuple:
        return f"list of {_named(parts[0])}" if parts[-1] is ... else f"list of {len(parts)} {_named(parts[0])}s"
    return NAMES[annotation]


def _default(field: FieldInfo, name: str, given: BaseModel | None) -> str:
    if given is None and field.is_required():
        return "required"
    return f"`{_value(field.default if given is None else getattr(given, name))}`"


def _value(value: Any) -> str:
    """As YAML has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """On one line, for a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
