"""From a YAML file and dotted overrides to a validated `Recipe`.

Invariant: whatever is wrong becomes one `RecipeError` of one line, raised before anything else happens.
What of the file an override makes idle is left out, and said.
Paths inside a recipe are relative to its file, paths in an override to the current folder; both leave here absolute.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from midflight.errors import did_you_mean
from midflight.recipe.config import IdleKey, Recipe, RecipeError
from midflight.recipe.own import check_kept_tools
from midflight.recipe.rules import check, is_task_file
from midflight.recipe.validating import not_a_section, validate
from midflight.rendering import plain
from midflight.slips import place_in, unquoted
from midflight.store.folder import RunFolder
from midflight.store.seals import newest_whole
from midflight.tools import BUILTIN
from midflight.tools.mcp import McpServer
from midflight.tools.own import is_file, is_own

PATH_KEYS = (
    ("agent", "planner", "examples"),
    *(("agent", module, "prompt") for module in ("planner", "executor", "verifier", "generator", "analyst")),
    ("train_tasks", "family"),
    ("eval_tasks", "family"),
)
"""Keys whose value may be a path."""

WRITE = "write key=value, with no spaces around '=', such as training.steps=10"


def load_recipe(
    path: str, overrides: Sequence[str] = (), *, tasks: bool = True, training: bool = True, supervised: bool = False
) -> Recipe:
    """Read a YAML recipe and apply dotted overrides such as `training.learning_rate=1e-5`.

    Without `tasks` or `training` what only they use goes unchecked; `supervised` training does not go by
    `training.steps`. A key of the file that an override makes idle is left out, with a line on standard error.

    Raises:
        RecipeError: unreadable file, unknown key (with the nearest valid one), bad value, or a broken cross-field rule.
    """
    file = find(path)
    data = read_yaml(file)
    anchor_paths(data, file.resolve().parent)
    if Path(path).is_dir():  # a run's, which nobody is writing: what is wrong in it is no slip of the command line
        validated(data, file)
    changed = apply_overrides(data, overrides)
    if overrides:
        anchor_paths(changed, Path.cwd())

    def checked(data: Mapping[str, Any]) -> Recipe:
        recipe = validate(data)
        check_kept_tools(RunFolder(file.parent), recipe)
        check(recipe, own_tasks=not tasks, training=training, supervised=supervised)
        return recipe

    while True:
        try:
            return pin_model(checked(changed))
        except IdleKey as idle:
            if not overrides or _is_given(idle.key, overrides) or _is_idle(idle.key, data, checked):
                raise
            _drop(changed, idle.key)
            print(f"{plain(idle.why, 1000)}; left out", file=sys.stderr)


def _is_given(key: str, overrides: Sequence[str]) -> bool:
    """Whether an override sets the key, something in it or what it is in."""
    given = (override.partition("=")[0].strip() for override in overrides)
    return any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in given)


def _is_idle(key: str, data: Mapping[str, Any], check: Callable[[Mapping[str, Any]], Recipe]) -> bool:
    """Whether the key is the first thing wrong with a recipe."""
    try:
        check(data)
    except IdleKey as idle:
        return idle.key == key
    except RecipeError:
        return False
    return False


def _drop(data: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for name in parents:
        data = data[name]
    del data[last]


def pin_model(recipe: Recipe) -> Recipe:
    """The recipe with the newest checkpoint in place of a run as `model.name`: that run may go on, these weights stay.

    Raises:
        RecipeError: the run has no checkpoint yet.
    """
    run = Path(os.path.expanduser(recipe.model.name))
    if not (run / "recipe.yaml").is_file():
        return recipe
    newest = newest_whole(RunFolder(run).checkpoints, lambda line: print(line, file=sys.stderr))
    if newest is None:
        raise RecipeError(f"model.name = {run}: the run has no checkpoint yet; let it train, or name another model")
    model = recipe.model.model_copy(update={"name": str(newest.resolve())})
    return recipe.model_copy(update={"model": model})


def folders() -> list[Path]:
    """Where a bare recipe name is looked up: `recipes` here, beside a checkout's package, in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return [Path("recipes"), package.parent / "recipes", package / "recipes_data"]


def shipped() -> list[str]:
    """Names of the recipes that a bare name can mean."""
    return sorted({file.stem for folder in folders() if folder.is_dir() for file in folder.glob("*.yaml")})


def find(path: str) -> Path:
    """The recipe's file, from a path, a run folder, or the bare name of a shipped recipe.

    Raises:
        RecipeError: there is none; the message lists the recipes that exist.
    """
    given = Path(path)
    if given.is_file():
        return given
    if given.is_dir() and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    if given.name == path:
        for folder in folders():
            for file in (folder / path, folder / f"{path}.yaml"):
                if file.is_file():
                    return file
    names = shipped()
    hint = did_you_mean(given.stem, names)
    raise RecipeError(f"recipe {path}: no such file or recipe; {hint}recipes that exist: {', '.join(names) or 'none'}")


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error and `1e-5` is a number, as people mean it.

    An alias stands for a plain value: a section in two places would be changed in both by an override of one, and lists
    of lists by alias grow without bound.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(self.anchors.get(event.anchor), yaml.CollectionNode):
                line = event.start_mark.line + 1
                raise RecipeError(f"line {line}: *{event.anchor} repeats a section or a list; write it out there")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be a plain word")
        line = key_node.start_mark.line + 1
        if key_node.value in seen:
            raise RecipeError(
                f"line {line}: key {key_node.value} is given twice (first on line {seen[key_node.value]})"
            )
        seen[key_node.value] = line
    return {str(key.value): loader.construct_object(value, deep=True) for key, value in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _parse(text: str) -> Any:
    """Plain values of a YAML text. Raises yaml.YAMLError or RecipeError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (RecipeError, yaml.YAMLError):
        raise
    except RecursionError:
        raise RecipeError("not YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # such as the date 2024-99-99
        raise RecipeError(f"not YAML: a value cannot be read ({unquoted(error)})") from None


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        RecipeError: unreadable, not YAML (with the line), a key given twice, or not a mapping.
    """
    try:
        data = _parse(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {file}: cannot be read: {error}") from None
    except RecipeError as error:
        raise RecipeError(f"recipe {file}, {error}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {file}, {_yaml_reason(error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"recipe {file}: must be key: value pairs, but holds {type(data).__name__}")
    return data


def validated(data: Mapping[str, Any], file: Path) -> Recipe:
    """The recipe that a file holds.

    Raises:
        RecipeError: a key or value is wrong; the line begins with the file.
    """
    try:
        return validate(data)
    except RecipeError as error:
        raise RecipeError(f"recipe {file}: {error}") from None


def _yaml_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: not YAML: {unquoted(error.problem)}"
    return f"not YAML: {error}"


def no_equals(override: str) -> str:
    """What is wrong with an override that has no `=`; of it, its key alone is shown."""
    return f"override {place_in(override) or '...'}: no '='; {WRITE}"


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with dotted `key=value` overrides applied in order; values are YAML.

    Raises:
        RecipeError: an override without `=`, without a key, with a value that is not YAML, or through a plain value.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides: must be a list, not a text; write ['{place_in(overrides) or 'key'}=value']")
    changed = copy.deepcopy(dict(data))
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals:
            raise RecipeError(no_equals(override))
        if not key or not all(key.split(".")):
            raise RecipeError(f"override {key}=...: no key before '='; {WRITE}")
        try:
            value = _parse(text)
        except (yaml.YAMLError, RecipeError) as error:
            reason = unquoted(error.problem if isinstance(error, yaml.MarkedYAMLError) else error)
            raise RecipeError(f"override {key}=...: the value is not YAML ({reason}); quote it") from None
        _set(changed, key, value)
    return changed


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    here = data
    for index, name in enumerate(parents):
        below = here.get(name)
        if below is None:
            below = here[name] = {}
        if not isinstance(below, dict):
            above = ".".join(parents[: index + 1])
            raise RecipeError(not_a_section(above, key, value))
        here = below
    here[last] = value


def anchor_paths(data: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of `data` absolute, in place."""
    for key in PATH_KEYS:
        section, value = path_at(data, key)
        if section is not None and value is not None:
            section[key[-1]] = _anchored(value, folder)
    agent = data.get("agent")
    if not isinstance(agent, dict):
        return
    names = agent.get("tools")
    if isinstance(names, list):
        own = [isinstance(name, str) and is_own(name) and is_file(name) for name in names]
        agent["tools"] = [_anchored(name, folder) if file else name for name, file in zip(names, own, strict=True)]
    for name, given in _entries(agent, "tool_options"):
        _anchor(given, BUILTIN[name].options_model.paths if name in BUILTIN else (), folder)
    if isinstance(sandbox := agent.get("sandbox"), dict):
        _anchor(sandbox, ("files", "keep"), folder)
    for _, given in _entries(agent, "mcp_servers"):
        _anchor(given, McpServer.paths, folder)


def _entries(agent: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """The sections below `key`, whatever else the unchecked recipe may hold there."""
    found = agent.get(key)
    return [entry for entry in found.items() if isinstance(entry[1], dict)] if isinstance(found, dict) else []


def _anchor(section: dict[str, Any], keys: Sequence[str], folder: Path) -> None:
    for key in keys:
        value = section.get(key)
        if isinstance(value, str):
            section[key] = _anchored(value, folder)
        elif isinstance(value, list):
            section[key] = [_anchored(one, folder) if isinstance(one, str) else one for one in value]


def _anchored(path: str, folder: Path) -> str:
    """An empty path stays one: it is no name of the recipe's folder."""
    return path and str(folder / os.path.expanduser(path))


def path_at(data: dict[str, Any], key: tuple[str, ...]) -> tuple[dict[str, Any] | None, str | None]:
    """The section that holds `key`, and its value where that is a path."""
    section: Any = data
    for name in key[:-1]:
        section = section.get(name) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        return None, None
    value = section.get(key[-1])
    is_path = isinstance(value, str) and (key[-1] in ("examples", "prompt") or is_task_file(value))
    return section, value if is_path else None
