"""From a plain mapping to a typed recipe, with one line for the first key or value that is wrong."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from midflight.engines.config import EngineConfig
from midflight.recipe.config import Recipe, RecipeError
from midflight.slips import SECRET, may_be_secret, stated

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
            # What was under the misspelt section is spelt out, but for what is below a secret: it may be the secret.
            while isinstance(value, Mapping) and len(value) == 1 and not SECRET.search(path):
                ((below, value),) = value.items()
                path += f".{below}"
                hint = hint.removesuffix("?") + f".{below}?" if hint.endswith("?") else hint
            raise RecipeError(f"{path if model is EngineConfig else stated(path, value, show)}: unknown key; {hint}")
        kinds = _members(field.annotation)
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        named = named_section(field.annotation)
        if named is not None and isinstance(value, Mapping):
            for name, inner in value.items():
                if not isinstance(inner, Mapping):
                    given = f"{path}.{name}" if named is EngineConfig else stated(f"{path}.{name}", inner, show)
                    raise RecipeError(f"{given}: must be a section of key: value pairs")
                _walk(inner, named, f"{path}.{name}.")
        elif isinstance(value, Mapping) and section is not None:
            _walk(value, section, f"{path}.")
        elif isinstance(value, Mapping) and value and typing.get_origin(field.annotation) is not dict:
            below = next(iter(value))
            raise RecipeError(not_a_section(path, f"{path}.{below}", value[below]))
        if isinstance(value, bool) and bool not in kinds and {int, float} & set(kinds):
            raise RecipeError(f"{path} = {show(value)}: must be a number")


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
    paths = key_paths(Recipe, "")
    leaves = difflib.get_close_matches(key, {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.8)
    elsewhere = [path for path in paths if leaves and path.rpartition(".")[2] == leaves[0]]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"valid keys of {prefix.rstrip('.') or 'a recipe'}: {', '.join(model.model_fields)}"


def key_paths(model: type[BaseModel], prefix: str) -> list[str]:
    """The dotted path of every key."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        named = named_section(field.annotation)
        if named is not None:
            found += key_paths(named, f"{prefix}{name}.NAME.")
        for kind in _members(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += key_paths(kind, f"{prefix}{name}.")
    return found


def _reason(data: Mapping[str, Any], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{path}: missing; the recipe must set it"
    value = "..." if may_be_secret(path, first["input"]) else show(first["input"])
    if path == "training.group_size" and first["type"] == "greater_than_equal":
        return f"{path} = {value}: a group of one always has advantage 0 (its reward is the mean); set it to 2 or more"
    if first["type"] in ("tuple_type", "list_type"):
        return f"{path} = {value}: must be a list; write [{value}]"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return f"{path} = {value}: must be a section of key: value pairs"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "string_type":
        message += "; quote it"
    return f"{path} = {value}: {message}"


def not_a_section(path: str, below: str, value: Any) -> str:
    """What is wrong where `below` is set, in a `path` that is a value."""
    if SECRET.search(path):  # what is below it may be the secret itself
        return f"{path}: it is a value, not a section; set {path} itself"
    given = below if below.startswith("engines.") else stated(below, value, show)
    return f"{given}: {path} is a value, not a section; set {path} itself"


def show(value: Any) -> str:
    """A value as YAML on one line, cut to 80 characters."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    text = " ".join(text.removesuffix("\n...\n").split())
    return text if len(text) <= 80 else text[:77] + "..."
