"""From a YAML file and dotted overrides to a validated `Recipe`.

Invariant: whatever is wrong becomes one `RecipeError` of one line, raised before anything else happens.
Paths inside a recipe are relative to its file, paths in an override to the current folder; both leave here absolute.
"""

from __future__ import annotations

import copy
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from midflight.recipe.config import Recipe, RecipeError
from midflight.recipe.own import check_kept_tools
from midflight.recipe.rules import check, is_task_file
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

COMMON_NAMES = {
    "lr": "training.learning_rate",
    "batch_size": "training.queries_per_step",
    "num_generations": "training.group_size",
    "max_steps": "training.steps",
    "num_epochs": "training.epochs",
    "beta": "training.kl_beta",
    "kl_coef": "training.kl_beta",
    "entropy_coef": "training.entropy_beta",
    "epsilon": "training.clip_epsilon",
    "clip_range": "training.clip_epsilon",
    "clip_ratio": "training.clip_epsilon",
    "grad_clip": "training.max_grad_norm",
    "warmup": "training.warmup_steps",
    "max_new_tokens": "agent.planner.max_tokens",
    "max_completion_length": "agent.planner.max_tokens",
    "max_seq_length": "model.context_length",
    "model_name_or_path": "model.name",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
}
"""What others call a key, and ours."""
WRITE = "write key=value, with no spaces around '=', such as training.steps=10"


def load_recipe(path: str, overrides: Sequence[str] = (), *, tasks: bool = True, training: bool = True) -> Recipe:
    """Read a YAML recipe and apply dotted overrides such as `training.learning_rate=1e-5`.

    Without `tasks` or `training` what only they use goes unchecked.

    Raises:
        RecipeError: unreadable file, unknown key (with the nearest valid one), bad value, or a broken cross-field rule.
    """
    file = find(path)
    data = read_yaml(file)
    anchor_paths(data, file.resolve().parent)
    if overrides:
        changed = apply_overrides(data, overrides)
        anchor_paths(changed, Path.cwd())
        data = changed
    recipe = validate(data)
    check_kept_tools(RunFolder(file.parent), recipe)
    check(recipe, own_tasks=not tasks, training=training)
    return pin_model(recipe)


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
    near = difflib.get_close_matches(given.stem, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(f"recipe {path}: no such file or recipe; {hint}recipes that exist: {', '.join(names) or 'none'}")


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error and `1e-5` is a number, as people mean it."""


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
        raise RecipeError(f"not YAML: a value cannot be read ({error})") from None


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        RecipeError: unreadable, not YAML (with the line), a key given twice, or not a mapping.
    """
    try:
        data = _parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {file}: cannot be read: {error}") from None
    except RecipeError as error:
        raise RecipeError(f"recipe {file}, {error}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {file}, {_yaml_reason(error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"recipe {file}: must be key: value pairs, but holds {type(data).__name__}")
    return data


def _yaml_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: not YAML: {error.problem}"
    return f"not YAML: {error}"


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with dotted `key=value` overrides applied in order; values are YAML.

    Raises:
        RecipeError: an override without `=`, without a key, with a value that is not YAML, or through a plain value.
    """
    changed = copy.deepcopy(dict(data))
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals:
            raise RecipeError(f"override {override}: no '='; {WRITE}")
        if not key or not all(key.split(".")):
            raise RecipeError(f"override {override}: no key before '='; {WRITE}")
        try:
            value = _parse(text)
        except (yaml.YAMLError, RecipeError) as error:
            reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            raise RecipeError(f"override {override}: the value is not YAML ({reason}); quote it") from None
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
            raise RecipeError(f"{key} = {show(value)}: {above} is a value, not a section; set {above} itself")
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
    return str(folder / os.path.expanduser(path))


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


def validate(data: Mapping[str, Any]) -> Recipe:
    """The typed recipe of a plain mapping.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    _walk(data, Recipe, "")
    held_out = data.get("eval_tasks")
    if isinstance(held_out, Mapping) and "family" not in held_out:
        defaults = Recipe.model_fields["eval_tasks"].default.model_dump(exclude_unset=True)
        data = {**data, "eval_tasks": {**defaults, **held_out}}  # a partial section keeps the held-out split
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_reason(data, error)) from None


def _walk(data: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    """Refuse unknown keys with the nearest valid one, and values that would be read as something else."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        field = model.model_fields.get(key)
        if field is None:
            hint = _nearest(key, model, prefix)
            while isinstance(value, Mapping) and len(value) == 1:  # spell out what was under the misspelt section
                ((below, value),) = value.items()
                path += f".{below}"
                hint = hint.removesuffix("?") + f".{below}?" if hint.endswith("?") else hint
            raise RecipeError(f"{path} = {show(value)}: unknown key; {hint}")
        kinds = _members(field.annotation)
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        named = named_section(field.annotation)
        if named is not None and isinstance(value, Mapping):
            for name, inner in value.items():
                if not isinstance(inner, Mapping):
                    raise RecipeError(f"{path}.{name} = {show(inner)}: must be a section of key: value pairs")
                _walk(inner, named, f"{path}.{name}.")
        elif isinstance(value, Mapping) and section is not None:
            _walk(value, section, f"{path}.")
        elif isinstance(value, Mapping) and value and typing.get_origin(field.annotation) is not dict:
            below = next(iter(value))
            raise RecipeError(
                f"{path}.{below} = {show(value[below])}: {path} is a value, not a section; set {path} itself"
            )
        if isinstance(value, bool) and bool not in kinds and {int, float} & set(kinds):
            raise RecipeError(f"{path} = {show(value)}: must be a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError(f"{path} = {show(value)}: must be a finite number")


def named_section(annotation: Any) -> type[BaseModel] | None:
    """The section of a field that holds any number of them by name."""
    if typing.get_origin(annotation) is not dict:
        return None
    kind = typing.get_args(annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _nearest(key: str, model: type[BaseModel], prefix: str) -> str:
    if key in COMMON_NAMES:
        own = COMMON_NAMES[key].rpartition(".")[2]
        return f"did you mean {prefix + own if own in model.model_fields else COMMON_NAMES[key]}?"
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    paths = _paths(Recipe, "")
    leaves = difflib.get_close_matches(key, {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.8)
    elsewhere = [path for path in paths if leaves and path.rpartition(".")[2] == leaves[0]]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"valid keys of {prefix.rstrip('.') or 'a recipe'}: {', '.join(model.model_fields)}"


def _paths(model: type[BaseModel], prefix: str) -> list[str]:
    """The dotted path of every key."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        named = named_section(field.annotation)
        if named is not None:
            found += _paths(named, f"{prefix}{name}.NAME.")
        for kind in _members(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += _paths(kind, f"{prefix}{name}.")
    return found


def _reason(data: Mapping[str, Any], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{path}: missing; the recipe must set it"
    value = show(first["input"])
    if path == "training.group_size" and first["type"] == "greater_than_equal":
        return f"{path} = {value}: a group of one always has advantage 0 (its reward is the mean); set it to 2 or more"
    if first["type"] in ("tuple_type", "list_type"):
        return f"{path} = {value}: must be a list; write [{value}]"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return f"{path} = {value}: must be a section of key: value pairs"
    message = first["msg"].replace("Input should be", "must be").replace("Field required", "missing")
    if first["type"] == "string_type":
        message += "; quote it"
    return f"{path} = {value}: {message}"


def show(value: Any) -> str:
    """A value as YAML on one line, cut to 80 characters."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    text = " ".join(text.removesuffix("\n...\n").split())
    return text if len(text) <= 80 else text[:77] + "..."
