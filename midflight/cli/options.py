"""What several commands take, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from midflight.errors import UserError
from midflight.recipe.rules import check_model_name
from midflight.slips import stated

RecipeArgument = Annotated[
    str, typer.Argument(help="A YAML file, a run folder, or a shipped recipe such as quickstart.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, such as training.steps=10.")]
AskingOverrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, such as agent.max_turns=6.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A run folder, smollm2-135m, a Hub name or a model folder.")
]


def check_model(model: str | None) -> None:
    if model is not None:
        check_model_name(model, f"--model {model}")


def refuse_training(overrides: Sequence[str], command: str) -> None:
    """Refuse changes to what only training uses."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip().split(".")[0] in ("training", "sft"):
            raise UserError(f"{stated(key.strip(), value)}: does nothing in midflight {command}; leave it out")


_SFT_TAKES = frozenset(
    "learning_rate warmup_steps final_rate weight_decay betas max_grad_norm weighting kl_beta kl_estimate entropy_beta "
    "pack_tokens attention max_drift save_every keep_last keep_best".split()
)
"""Of the section `training`."""


def is_idle(override: str, command: str) -> bool:
    """Whether `train` or `sft` would not use a change; a recipe has the keys of both."""
    section, *fields = override.partition("=")[0].strip().split(".")
    if command == "train":
        return section == "sft"
    return section == "train_tasks" or section == "training" and bool({*fields[:1]} - _SFT_TAKES)


def refuse_idle(overrides: Sequence[str], command: str) -> None:
    """Refuse changes that `train` or `sft` would not use."""
    for override in overrides:
        if is_idle(override, command):
            key, _, value = override.partition("=")
            other = {"training.epochs": "sft.epochs", "sft.epochs": "training.epochs"}.get(key.strip())
            hint = f"; did you mean {other}?" if other else ""
            raise UserError(f"{stated(key.strip(), value)}: does nothing in midflight {command}; leave it out{hint}")


def refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse the first option that was given."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UserError(f"{name}: {why}")
