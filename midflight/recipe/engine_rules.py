"""Rules for a recipe's engines: which module may use which, and which keys a provider has a use for.

Invariant: as in `rules`; and a key's value is never shown where a secret could have been put by mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from midflight.engines.config import OPERATION, EngineConfig
from midflight.errors import did_you_mean
from midflight.recipe.config import IdleKey, ModelConfig, Recipe, RecipeError
from midflight.recipe.tool_rules import tool_engines

_UNUSED = {
    "openai": ("tokenizer",),
    "litellm": ("tokenizer", "api"),
    "vllm": ("structured", "max_tokens_field", "cache"),
    "local": (*OPERATION, "api", "structured", "max_tokens_field", "tokenizer"),
}
"""Keys that a provider has no use for."""
_UNUSED_BY_EMBEDDINGS = ("structured", "max_tokens_field", "completion_price", "cache")
_NAME = re.compile(r"[a-z0-9_-]+")


def check_engines(recipe: Recipe, *, training: bool) -> None:
    """Refuse engines that are wrong in themselves, unknown or used by nobody.

    Raises:
        RecipeError: the first broken rule.
    """
    for name, engine in recipe.engines.items():
        if not _NAME.fullmatch(name):
            raise RecipeError(f"engines.{name}: an engine's name is of small letters, digits, '_' and '-'; rename it")
        _check_engine(f"engines.{name}", engine)
    models = recipe.agent.language_models
    for module, settings in models.items():
        if settings.engine is not None and settings.engine not in recipe.engines:
            hint = did_you_mean(settings.engine, recipe.engines)
            known = ", ".join(recipe.engines) or "none"
            raise RecipeError(
                f"{recipe.agent.engine_key(module)} = {settings.engine}: no such engine; {hint}engines of this recipe: "
                f"{known}"
            )
    if recipe.agent.engine is not None and all(getattr(recipe.agent, module).engine is not None for module in models):
        why = f"agent.engine = {recipe.agent.engine}: does nothing, as every module names an engine"
        raise IdleKey("agent.engine", why, "remove it")
    _check_writers(recipe)
    used = {settings.engine for settings in models.values()} | tool_engines(recipe)
    for name in recipe.engines:
        if name not in used:
            use = _use(recipe, name, training)
            advice = f"set {use}={name}, or remove it" if use else "remove it"
            raise IdleKey(f"engines.{name}", f"engines.{name}: nothing uses it", advice)
    for name, engine in recipe.engines.items():
        if engine.provider != "local" and engine.total_seconds >= recipe.agent.max_seconds:
            raise RecipeError(
                f"engines.{name}.total_seconds = {engine.total_seconds:g}: agent.max_seconds = "
                f"{recipe.agent.max_seconds:g} would end a trajectory first, and so hide that its server failed; set "
                f"agent.max_seconds above {engine.total_seconds:g}, or engines.{name}.total_seconds below it"
            )
    _check_planner(recipe, training)
    _check_model_is_used(recipe, used)
    _check_budget(recipe)


def asked_at_once(recipe: Recipe, questions: int) -> dict[str, int]:
    """How many trajectories an evaluation has at once, for `too_slow`."""
    return {"evaluation.concurrency": min(recipe.evaluation.concurrency, questions * recipe.evaluation.trials)}


def too_slow(recipe: Recipe, together: Mapping[str, int]) -> list[str]:
    """A warning for each pace of an engine that cannot carry the trajectories at once within `agent.max_seconds`, if
    each has one turn. It is no rule: how many turns there will be, nobody knows.

    Args:
        recipe: what the engines and their modules are of.
        together: how many trajectories are at once, by the key to set for fewer.
    """
    agent = recipe.agent
    warnings = []
    for name, engine in recipe.engines.items():
        asking = [module.max_tokens for module in agent.language_models.values() if module.engine == name]
        uses = {"requests_per_minute": ("requests", len(asking)), "tokens_per_minute": ("new tokens", sum(asking))}
        for pace, (unit, amount) in uses.items():
            rate = getattr(engine, pace)
            if rate is None or not amount:
                continue
            seconds = 60 * amount / rate
            carried = int(agent.max_seconds / seconds)
            for key, count in together.items():
                if count > carried:
                    fewer = f"{key} to {carried} or less, or " if carried else ""
                    needed = count * seconds
                    warnings.append(
                        f"warning: engines.{name}.{pace} = {rate:g}: too slow for {count} trajectories at once "
                        f"({key}), which take {needed:.0f} s with one turn each ({amount} {unit}), and "
                        f"agent.max_seconds = {agent.max_seconds:g}; set {fewer}agent.max_seconds above "
                        f"{math.ceil(needed)}"
                    )
    return warnings


def _use(recipe: Recipe, name: str, training: bool) -> str | None:
    """The key that would put an engine to use, where there is one that would not be refused for it."""
    agent, engine = recipe.agent, recipe.engines[name]
    models = agent.language_models
    if engine.api == "embeddings":
        return "agent.tool_options.read_url.embeddings"
    if not training and any(module.engine is None for module in models.values()):
        return "agent.engine"
    fit = [module for module in models if not training or (module == "planner") == (engine.provider == "vllm")]
    return f"agent.{fit[-1]}.engine" if fit else None


def _check_engine(key: str, engine: EngineConfig) -> None:
    if engine.api == "embeddings" and engine.provider == "vllm":
        raise RecipeError(f"{key}.api = embeddings: takes provider openai, whose protocol a vLLM server speaks too")
    unused = [(field, f"provider {engine.provider}") for field in _UNUSED[engine.provider]]
    unused += [(field, "api embeddings") for field in _UNUSED_BY_EMBEDDINGS if engine.api == "embeddings"]
    for field, by in unused:
        if getattr(engine, field) != EngineConfig.model_fields[field].default:
            shown = "" if field in ("key_variable", "base_url") else f" = {getattr(engine, field)}"
            why = f"{key}.{field}{shown}: does nothing with {by}"
            if field == "api":  # without it the engine would be of another kind
                raise RecipeError(f"{why}; remove it")
            raise IdleKey(f"{key}.{field}", why, "remove it")
    if engine.key_variable is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", engine.key_variable):
        raise RecipeError(
            f"{key}.key_variable: not shown here, for it does not look like the name of an environment variable, such "
            "as OPENAI_API_KEY; give a name, never the key itself"
        )
    if engine.base_url is None:
        if engine.provider in ("openai", "vllm"):
            raise RecipeError(f"{key}.base_url: missing; set where the server is, such as http://127.0.0.1:8000/v1")
    else:
        try:
            parts = urlsplit(engine.base_url)
            fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            fine = fine and re.fullmatch("[!-~]+", engine.base_url) is not None
            (parts.hostname or "").encode("idna")  # as it is looked up
        except ValueError:
            fine = False
        if not fine:
            raise RecipeError(
                f"{key}.base_url: must be http://host or https://host, with port and path where needed, in ASCII"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise RecipeError(f"{key}.base_url: has a user, a query or a fragment; give the key by key_variable alone")
    if engine.attempt_seconds > engine.total_seconds:
        raise RecipeError(
            f"{key}.attempt_seconds = {engine.attempt_seconds:g}: more than total_seconds = {engine.total_seconds:g}, "
            f"so it would never be reached; set {key}.attempt_seconds to {engine.total_seconds:g} or less, or "
            f"total_seconds to {engine.attempt_seconds:g} or more"
        )


def _check_writers(recipe: Recipe) -> None:
    """No module asks an embedding model."""
    for module, settings in recipe.agent.language_models.items():
        if settings.engine is not None and recipe.engines[settings.engine].api == "embeddings":
            raise RecipeError(
                f"{recipe.agent.engine_key(module)} = {settings.engine}: engines.{settings.engine}.api = embeddings "
                "writes no text; name another engine"
            )


def _check_planner(recipe: Recipe, training: bool) -> None:
    planner, name, named = recipe.agent.planner, recipe.agent.planner_engine, recipe.agent.engine_key("planner")
    if name is None:
        return
    engine = recipe.engines[name]
    key = f"{named} = {name}"
    if recipe.agent.grounded and engine.provider in ("openai", "litellm") and engine.structured != "grammar":
        raise RecipeError(
            f"agent.grounded = true: is held by a grammar, and {name} takes none; set agent.grounded=false, "
            f"or engines.{name}.structured=grammar where its server takes them"
        )
    if planner.top_k and engine.provider in ("openai", "litellm"):
        raise RecipeError(
            f"agent.planner.top_k = {planner.top_k}: provider {engine.provider} has no such setting; set 0, or "
            f"agent.planner.top_p"
        )
    if not training:
        return
    if engine.provider == "local":
        raise RecipeError(f"{key}: training trains the recipe's model; set {named}=null and model.name={engine.model}")
    if engine.provider != "vllm":
        raise RecipeError(
            f"{key}: provider {engine.provider} gives no token ids and no log-probs of the drawn distribution, and "
            f"without them nothing can train; set {named}=null, or give it a vllm engine (midflight solve and eval "
            "take it as it is)"
        )
    if recipe.model.lora is None:
        raise RecipeError(
            f"{key}: a server takes new weights as an adapter, and model.lora = null trains all weights; set model.lora"
        )
    if planner.top_p < 1 or planner.top_k:
        raise RecipeError(
            f"{key}: a server does not say which tokens top_p and top_k left, which the trainer has to know; set "
            "agent.planner.top_p=1 and agent.planner.top_k=0"
        )

    _check_only_the_planner(recipe, name)


def _check_only_the_planner(recipe: Recipe, name: str) -> None:
    """The planner's server draws from the weights under training, and only the planner may."""
    modules = recipe.agent.language_models.items()
    engine_key = recipe.agent.engine_key
    others = [engine_key(module) for module, one in modules if module != "planner" and one.engine == name]
    if name in tool_engines(recipe):
        others.append("agent.tool_options.TOOL.engine")
    if others:
        second = "name a second engine there"
        if others[0] == "agent.engine":
            second = f"set agent.planner.engine={name}, and agent.engine to a second engine"
        raise RecipeError(
            f"{others[0]} = {name}: is the planner's, which draws from the weights under training; {second}, with "
            f"base_url and model as those of engines.{name} for the untrained model"
        )


def _check_model_is_used(recipe: Recipe, used: set[str | None]) -> None:
    if None in used:
        return
    for field in ModelConfig.model_fields:
        if getattr(recipe.model, field) != ModelConfig.model_fields[field].default:
            planner = recipe.agent.planner_engine
            if planner is not None and recipe.engines[planner].provider == "vllm":
                return  # in training it is what trains
            raise IdleKey(
                f"model.{field}",
                f"model.{field}: does nothing, as every module names an engine",
                f"remove it, or set {recipe.agent.engine_key('planner')}=null",
            )


def _check_budget(recipe: Recipe) -> None:
    budget = recipe.budget
    served = {name: engine for name, engine in recipe.engines.items() if engine.provider != "local"}
    for field in ("tokens", "money"):
        if getattr(budget, field) is not None and not served:
            raise IdleKey(
                f"budget.{field}",
                f"budget.{field} = {getattr(budget, field):g}: does nothing, as no engine is on a server",
                "remove it",
            )
    free = [name for name, engine in served.items() if not (engine.prompt_price or engine.completion_price)]
    if budget.money is not None and len(free) == len(served):
        raise RecipeError(
            f"budget.money = {budget.money:g}: would never be spent, as no engine has a price; set "
            f"engines.{free[0]}.prompt_price and completion_price, or budget.tokens"
        )
