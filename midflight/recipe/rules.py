"""Rules between the keys of a recipe: each says which key to set instead.

Invariant: a setting that the run would not use is an error here, never a silence later.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel

from midflight.agent.examples import worked_examples
from midflight.agent.prompting import template_fault
from midflight.errors import did_you_mean
from midflight.recipe.config import AgentConfig, IdleKey, ModuleConfig, Recipe, RecipeError, TaskSource, TrainingConfig
from midflight.recipe.engine_rules import check_engines
from midflight.recipe.tool_rules import check_sandbox, check_servers, check_tools
from midflight.tasks import load_tasks
from midflight.tasks.atlas import KINDS
from midflight.tools import BUILTIN

EMBEDDED_MODEL = "smollm2-135m"
"""The name of the model that comes as a package."""

MODEL_FILES = ("config.json", "adapter_config.json", "recipe.yaml")
"""One of these makes a folder a model, an adapter or a run."""

FAMILIES = {"atlas": tuple(KINDS)}
"""Kinds of each built-in task family."""


def check(
    recipe: Recipe,
    *,
    own_tools: Collection[str] = (),
    own_tasks: bool = False,
    training: bool = True,
    supervised: bool = False,
) -> None:
    """Refuse a recipe whose keys do not go together.

    Args:
        recipe: a recipe whose single values are valid.
        own_tools: names of tools that the caller passes as objects.
        own_tasks: the caller passes its tasks as objects, or draws none: the task sections are not looked at.
        training: the caller trains; otherwise what only training uses is not looked at.
        supervised: it trains on demonstrations, which say how many steps there are.

    Raises:
        RecipeError: the first broken rule.
    """
    _check_name(recipe)
    _check_model(recipe)
    check_tools(recipe, own_tools, builtin_tools())
    check_sandbox(recipe)
    if recipe.agent.max_calls is not None and recipe.agent.max_calls >= recipe.agent.max_turns:
        raise IdleKey(
            "agent.max_calls",
            f"agent.max_calls = {recipe.agent.max_calls}: does nothing, as agent.max_turns = {recipe.agent.max_turns} "
            "bounds the calls, one a turn",
            "set it lower, or null",
        )
    check_servers(recipe)
    _check_modules(recipe)
    check_engines(recipe, training=training)
    for name, engine in recipe.engines.items():
        if engine.provider == "local":
            check_model_name(engine.model, f"engines.{name}.model = {engine.model}")
    _check_budget(recipe)
    if training:
        if not supervised:
            check_schedule(recipe.training, recipe.training.steps, f"training.steps = {recipe.training.steps}")
        _check_training(recipe)
    if not own_tasks:
        _check_tasks(recipe, training)
    _check_evaluation(recipe)


def is_task_file(family: str) -> bool:
    """Whether `family` is a path to a JSONL file, not the name of a built-in family."""
    return family.endswith((".jsonl", ".json")) or "/" in family


def _check_name(recipe: Recipe) -> None:
    name = recipe.name
    if not name.strip(". ") or not name.isprintable() or "/" in name:
        raise RecipeError(f"name = {name!r}: run folders are called after it; give a word without slashes")


def _check_model(recipe: Recipe) -> None:
    name = recipe.model.name
    key = f"model.name = {name}"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", recipe.model.device):
        raise RecipeError(f"model.device = {recipe.model.device}: unknown; set auto, cpu, cuda, cuda:0 or mps")
    check_model_name(name, key)


def check_model_name(name: str, key: str) -> None:
    """Refuse a model name that can be neither the embedded model, nor a local folder, nor a Hub name.

    Raises:
        RecipeError: the line starts with `key`.
    """
    if name == EMBEDDED_MODEL:
        return
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not any((folder / part).exists() for part in MODEL_FILES):
            raise RecipeError(
                f"{key}: the folder is neither a model, an adapter nor a run; it holds none of {', '.join(MODEL_FILES)}"
            )
        return
    if name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        raise RecipeError(f"{key}: no such folder; give a run folder, a model folder, {EMBEDDED_MODEL} or a Hub name")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        hint = did_you_mean(name, [EMBEDDED_MODEL])
        raise RecipeError(
            f"{key}: unknown model; {hint}give {EMBEDDED_MODEL}, a Hub name like Qwen/Qwen2.5-7B-Instruct or a folder"
        )


def builtin_tools() -> list[str]:
    """Names of the tools a recipe can list, `finish` not among them."""
    return list(BUILTIN)


def _check_modules(recipe: Recipe) -> None:
    agent = recipe.agent
    modules: tuple[tuple[str, ModuleConfig, str], ...] = (
        ("executor", agent.executor, agent.executor.kind),
        ("verifier", agent.verifier, agent.verifier.kind),
        ("generator", agent.generator, agent.generator.kind),
    )
    for name, module, kind in modules:
        unused = sorted(module.model_fields_set & {"engine", "prompt", "temperature", "max_tokens"})
        # A resolved recipe spells every default out; only a value that differs asks for something.
        unused = [field for field in unused if getattr(module, field) != type(module).model_fields[field].default]
        if kind != "llm" and unused:
            key = f"agent.{name}.{unused[0]}"
            raise IdleKey(
                key,
                f"{key} = {getattr(module, unused[0])}: does nothing with agent.{name}.kind = {kind}",
                f"remove it or set agent.{name}.kind=llm",
            )
    if not agent.query_analysis and agent.analyst != ModuleConfig():
        raise IdleKey(
            "agent.analyst",
            "agent.analyst: does nothing with agent.query_analysis = false",
            "remove it or set agent.query_analysis=true",
        )
    if agent.grounded and not agent.planner.grammar:
        raise RecipeError("agent.grounded = true: is held by the grammar; set agent.planner.grammar=true")
    if agent.grounded and agent.executor.kind == "llm":
        raise RecipeError(
            "agent.grounded = true: an argument is a quote or a result, which an LLM executor has nothing to add to; "
            "set agent.executor.kind=direct or agent.grounded=false"
        )
    for name, settings in agent.language_models.items():
        if settings.prompt is not None:
            key = f"agent.{name}.prompt"
            built_in = template_name(agent, name)
            fault = template_fault(built_in, _text_of(key, settings.prompt))
            if fault is not None:
                begin = f"begin with the built-in one, midflight/agent/prompts/{built_in}.txt"
                raise RecipeError(f"{key} = {settings.prompt}: {fault}; {begin}")
    examples = agent.planner.examples
    if examples is not None:
        text = _text_of("agent.planner.examples", examples)
        if not text.strip():
            raise RecipeError(f"agent.planner.examples = {examples}: the file is empty; write examples or set null")
    nearest = agent.planner.nearest_examples
    if nearest is not None:
        key = f"agent.planner.nearest_examples = {nearest}"
        if examples is None:
            raise IdleKey(
                "agent.planner.nearest_examples",
                f"{key}: there are no examples to choose from",
                "set agent.planner.examples or remove it",
            )
        blocks = worked_examples(Path(examples).read_text(encoding="utf-8-sig")).blocks
        if not all(block.startswith("Question:") for block in blocks):
            raise RecipeError(f'{key}: {examples} does not start with "Question:"; begin each example with such a line')
        if nearest > len(blocks):
            raise RecipeError(f"{key}: {examples} has {len(blocks)}; set {len(blocks)} or less, or null to show all")


def _text_of(key: str, file: str) -> str:
    if not Path(file).is_file():
        raise RecipeError(f"{key} = {file}: no such file; give a text file or null")
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{key} = {file}: cannot be read ({error}); give a text file in UTF-8") from None


def template_name(agent: AgentConfig, module: str) -> str:
    """Which built-in template a module has."""
    return f"planner_{agent.planner.format}" if module == "planner" else module


def _check_budget(recipe: Recipe) -> None:
    agent = recipe.agent
    for name, module in agent.language_models.items():
        if name == "analyst":  # it comes before there is a memory
            continue
        room, key = recipe.model.context_length, "model.context_length"
        if module.engine is not None:
            room, key = recipe.engines[module.engine].context_length, f"engines.{module.engine}.context_length"
        need = agent.memory_tokens + module.max_tokens
        if need >= room:
            raise RecipeError(
                f"{key} = {room}: agent.memory_tokens ({agent.memory_tokens}) and "
                f"agent.{name}.max_tokens ({module.max_tokens}) leave no room for the prompt; set {key} "
                f"above {need} or lower agent.memory_tokens"
            )


def check_schedule(training: TrainingConfig, steps: int, why: str) -> None:
    """Refuse a rate that would never be reached, or never fall, in so many steps; `why` there are as many.

    Raises:
        IdleKey: of the warm-up or the fall.
    """
    if training.warmup_steps >= steps:
        raise IdleKey(
            "training.warmup_steps",
            f"training.warmup_steps = {training.warmup_steps}: the rate is reached in the step after them, and {why}",
            f"set training.warmup_steps to at most {steps - 1}",
        )
    if training.final_rate != 1 and training.warmup_steps == steps - 1:
        raise IdleKey(
            "training.final_rate",
            f"training.final_rate = {training.final_rate:g}: does nothing, as the rate is reached in the last step "
            f"({why})",
            "remove it or lower training.warmup_steps" if training.warmup_steps else "remove it",
        )


def _check_training(recipe: Recipe) -> None:
    training = recipe.training
    for beta in training.betas:
        if not 0 <= beta < 1:
            raise RecipeError(f"training.betas = {list(training.betas)}: each must be at least 0 and below 1")
    queries = training.queries_per_step
    if training.refill_factor > 1 and training.most_queries == queries:
        least = math.ceil(100 * (1 + 1 / queries)) / 100
        raise RecipeError(
            f"training.refill_factor = {training.refill_factor:g}: less than one query more than "
            f"training.queries_per_step = {queries}; set training.refill_factor={least:g} or 1"
        )
    _check_objective(training)
    if recipe.model.dtype == "bfloat16" and training.max_drift < 1e-2:
        raise RecipeError(
            f"training.max_drift = {training.max_drift:g}: bfloat16 rounds by more, the run would stop at once; "
            f"set training.max_drift=0.05 or model.dtype=float32"
        )


def _check_objective(training: TrainingConfig) -> None:
    """Refuse what the chosen advantage, loss and KL would not use."""
    fields = type(training).model_fields

    def changed(key: str) -> bool:
        return bool(getattr(training, key) != fields[key].default)

    def refuse(key: str, with_key: str, instead: str) -> None:
        value, other = getattr(training, key), getattr(training, with_key)
        shown = "" if isinstance(value, BaseModel) else f" = {value}"
        raise IdleKey(
            f"training.{key}",
            f"training.{key}{shown}: does nothing with training.{with_key} = {other}",
            f"remove it or set {instead}",
        )

    if changed("gigpo") and training.advantage != "gigpo":
        refuse("gigpo", "advantage", "training.advantage=gigpo")
    if changed("overlong_penalty") and training.overlong != "penalise":
        refuse("overlong_penalty", "overlong", "training.overlong=penalise")
    for key in ("kl_estimate", "kl_in"):
        if changed(key) and training.kl_beta == 0:
            refuse(key, "kl_beta", "training.kl_beta=0.001")
    if training.kl_in == "reward" and training.advantage == "gigpo":
        raise RecipeError(
            "training.kl_in = reward: training.advantage = gigpo would scale the KL of turns that else ended alike to "
            "full strength; set training.kl_in=loss or another training.advantage"
        )
    if changed("importance_cap") and not changed("max_drift"):
        raise RecipeError(
            f"training.importance_cap = {training.importance_cap:g}: with training.max_drift = {training.max_drift:g} "
            "the run stops before any weight differs from 1; set training.max_drift to the log-prob gap that is to be "
            "corrected, as 0.5, or leave importance_cap out"
        )
    clips = {"reinforce": ("clip_epsilon", "clip_epsilon_high", "dual_clip"), "cispo": ("dual_clip",)}
    for key in clips.get(training.loss, ()):
        if changed(key):
            refuse(key, "loss", "training.loss=ppo_clip")
    if training.epochs == training.mini_batches == 1 and (training.importance_cap or not changed("max_drift")):
        for key in ("clip_epsilon", "clip_epsilon_high", "dual_clip"):
            if changed(key):
                raise IdleKey(
                    f"training.{key}",
                    f"training.{key} = {getattr(training, key)}: does nothing in the first optimizer step on a batch, "
                    "where ratios are 1, and training.epochs = training.mini_batches = 1",
                    "remove it or set training.epochs=2",
                )
    if training.loss == "reinforce":
        for key in ("epochs", "mini_batches"):
            if changed(key):
                raise RecipeError(
                    f"training.{key} = {getattr(training, key)}: training.loss = reinforce is for data of the weights "
                    f"that train, and has no ratio for later steps; set training.loss=ppo_clip or training.{key}=1"
                )
    most = training.queries_per_step * training.group_size
    if training.mini_batches > most:
        raise RecipeError(
            f"training.mini_batches = {training.mini_batches}: a step may have no more than queries_per_step x "
            f"group_size = {most} trajectories; set training.mini_batches={most} or less"
        )


def _check_tasks(recipe: Recipe, training: bool) -> None:
    train, held_out = recipe.train_tasks, recipe.eval_tasks
    kinds = _check_source("train_tasks", train)
    if held_out is not None:
        _check_source("eval_tasks", held_out)
        if train.family == held_out.family and train.split == held_out.split and not is_task_file(train.family):
            change = "train_tasks.split=train" if held_out.split == "test" else "eval_tasks.split=test"
            raise RecipeError(f"eval_tasks.split = {held_out.split}: also the split that is trained on; set {change}")
        if training and is_task_file(train.family) and Path(train.family).resolve() == Path(held_out.family).resolve():
            raise RecipeError(
                f"eval_tasks.family = {held_out.family}: also the file that is trained on; give questions that are not "
                "in it, or set eval_tasks=null"
            )
        if held_out.count is None and not is_task_file(held_out.family):
            raise RecipeError(f"eval_tasks.count = null: {held_out.family} draws without end; set eval_tasks.count=240")
    if recipe.training.curriculum is None or not training:
        return
    chosen = train.kinds if train.kinds is not None else kinds
    if len(set(chosen)) < 2:
        where = "train_tasks.kinds" if train.kinds is not None else f'the "kind" of the lines of {train.family}'
        raise IdleKey(
            "training.curriculum",
            f"training.curriculum: has one kind to choose from ({next(iter(chosen), 'none')})",
            f"give {where} two or more values or set training.curriculum=null",
        )


def _check_source(name: str, source: TaskSource) -> tuple[str, ...]:
    """The kinds that a source can draw."""
    family = source.family
    if source.kinds == ():
        raise RecipeError(f"{name}.kinds = []: leaves no question; name a kind, or set {name}.kinds=null for all")
    if not is_task_file(family):
        if family not in FAMILIES:
            hint = did_you_mean(family, FAMILIES)
            raise RecipeError(
                f"{name}.family = {family}: unknown family; {hint}give {', '.join(FAMILIES)} or a path to a .jsonl file"
            )
        for kind in source.kinds or ():
            if kind not in FAMILIES[family]:
                hint = did_you_mean(kind, FAMILIES[family])
                raise RecipeError(
                    f"{name}.kinds = {kind}: unknown kind of {family}; {hint}kinds: {', '.join(FAMILIES[family])}"
                )
        return tuple(FAMILIES[family])
    default = type(source)(family=family)
    for key in ("split", "seed"):  # a resolved recipe spells defaults out
        if getattr(source, key, None) != getattr(default, key, None):
            raise IdleKey(
                f"{name}.{key}",
                f"{name}.{key} = {getattr(source, key)}: does nothing for a task file, which is one fixed list",
                f"remove it or set {name}.{key}={getattr(default, key)}",
            )
    try:
        kinds = tuple(dict.fromkeys(task.kind for task in load_tasks(family)))
    except ValueError as error:
        raise RecipeError(f"{name}.family = {error}; give a JSONL file of {{id, question, answer, checker}}") from None
    for kind in source.kinds or ():
        if kind not in kinds:
            raise RecipeError(f"{name}.kinds = {kind}: no line of {family} has it; kinds there: {', '.join(kinds)}")
    return kinds


def _check_evaluation(recipe: Recipe) -> None:
    if recipe.evaluation.trials > 1 and recipe.agent.planner.eval_temperature == 0:
        raise RecipeError(
            f"evaluation.trials = {recipe.evaluation.trials}: greedy trials are all the same; "
            f"set agent.planner.eval_temperature above 0 or evaluation.trials=1"
        )
