"""From a recipe to a running agent: tools, engines, the four modules, the flow.

torch is imported where an engine is local, and nowhere else: an agent on servers alone starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from midflight.agent import (
    AgentFlow,
    DirectExecutor,
    LastResultGenerator,
    LLMAnalyst,
    LLMExecutor,
    LLMGenerator,
    LLMPlanner,
    LLMVerifier,
    Query,
    RuleVerifier,
)
from midflight.agent.examples import worked_examples
from midflight.agent.memory import Memory
from midflight.engines.base import Engine, Sampling
from midflight.engines.http import Ledger
from midflight.engines.remote import remote_engine, unhidden
from midflight.engines.served import ServedEngine
from midflight.errors import UserError
from midflight.loading import load_named, load_trained
from midflight.progress import Progress
from midflight.recipe import Recipe, RecipeError
from midflight.recipe.config import ModuleConfig, PlannerConfig
from midflight.recipe.tool_rules import has_frozen_models
from midflight.sandbox.choose import shared_sandbox
from midflight.sandbox.workspace import StartFiles
from midflight.tools import ToolContext, make_toolset, mcp_servers
from midflight.tools.base import Tool, Toolset
from midflight.tools.options import key_from

if TYPE_CHECKING:
    from midflight.engines.local import LoadedModel, LocalEngine


class Closable(Protocol):
    """What has workers to end."""

    def close(self) -> None: ...


def close_all(made: Iterable[Closable]) -> None:
    for one in made:
        one.close()


@dataclass(frozen=True)
class Built:
    """A ready agent. `close` ends its engines' workers and what its tools hold.

    `ledger` has what engines on servers used.
    """

    flow: AgentFlow
    engines: tuple[Closable, ...]
    ledger: Ledger = field(default_factory=Ledger)

    def close(self) -> None:
        self.flow.toolset.close()
        close_all(self.engines)


def toolset_of(
    recipe: Recipe, tools: Sequence[Tool] | None = None, engine: Callable[[str | None], Engine | None] = lambda _: None
) -> Toolset:
    """The recipe's tools; `tools` are the caller's own, found by name before the built-in ones.

    `engine` gives the language model of tools that ask one, when they first do, by the name in their options.
    """
    agent = recipe.agent
    return make_toolset(agent.tools, agent.tool_options, context_of(recipe, engine), tools or (), agent.mcp_servers)


def context_of(recipe: Recipe, engine: Callable[[str | None], Engine | None]) -> ToolContext:
    """What the recipe's tools get from around them; `engine` as for `toolset_of`, None being the recipe's model."""

    def ask(name: str | None) -> Engine:
        found = engine(recipe.agent.tools_engine if name is None else name)
        if found is None:
            raise UserError("a tool asks a language model, and there is none beside the planner's")
        return found

    options = recipe.agent.sandbox
    servers = mcp_servers(recipe.agent.mcp_servers).values()
    return ToolContext(
        engine=ask,
        sandbox=lambda: shared_sandbox(options),
        files=StartFiles(Path(options.files)) if options.files else None,
        keys=(*_keys(recipe), *(key for server in servers for key in server.keys)),
        keep=Path(options.keep) if options.keep else None,
    )


def assemble(
    recipe: Recipe,
    toolset: Toolset,
    planner: Engine,
    frozen: Engine | None,
    *,
    training: bool,
    own: Mapping[str, Engine] | None = None,
) -> AgentFlow:
    """The flow of `recipe`: the planner on its engine, the other language models on their `own`, else on `frozen`."""
    agent = recipe.agent
    examples = Path(agent.planner.examples).read_text(encoding="utf-8-sig") if agent.planner.examples else ""
    temperature = agent.planner.temperature if training else agent.planner.eval_temperature

    def prompt(module: PlannerConfig | ModuleConfig) -> str:
        return Path(module.prompt).read_text(encoding="utf-8-sig") if module.prompt else ""

    def sampling(module: ModuleConfig) -> Sampling:
        return Sampling(temperature=module.temperature, max_tokens=module.max_tokens)

    def other(module: str) -> Engine:
        engine = (own or {}).get(module, frozen)
        assert engine is not None, "has_frozen_models says that an engine is needed"
        return engine

    return AgentFlow(
        LLMPlanner(
            planner,
            format=agent.planner.format,
            examples=examples,
            nearest_examples=agent.planner.nearest_examples,
            grammar=agent.planner.grammar,
            grounded=agent.grounded,
            direct=agent.executor.kind == "direct",
            sampling=Sampling(
                temperature=temperature,
                top_p=agent.planner.top_p,
                top_k=agent.planner.top_k,
                max_tokens=agent.planner.max_tokens,
            ),
            prompt=prompt(agent.planner),
        ),
        LLMExecutor(other("executor"), sampling(agent.executor), prompt=prompt(agent.executor))
        if agent.executor.kind == "llm"
        else DirectExecutor(),
        LLMVerifier(other("verifier"), sampling(agent.verifier), prompt=prompt(agent.verifier))
        if agent.verifier.kind == "llm"
        else RuleVerifier(),
        LLMGenerator(other("generator"), sampling(agent.generator), prompt=prompt(agent.generator))
        if agent.generator.kind == "llm"
        else LastResultGenerator(),
        toolset,
        max_turns=agent.max_turns,
        max_calls=agent.max_calls,
        max_seconds=agent.max_seconds,
        memory_tokens=agent.memory_tokens,
        tool_seconds=agent.tool_seconds,
        grounded=agent.grounded,
        analyst=LLMAnalyst(other("analyst"), sampling(agent.analyst), prompt(agent.analyst))
        if agent.query_analysis
        else None,
    )


def check_prompt_fits(recipe: Recipe, flow: AgentFlow, engine: LocalEngine) -> None:
    """Refuse a chat template that takes no such prompt, and a context that cannot hold the smallest prompt, a full
    memory and one action.

    Raises:
        RecipeError: one line with what to set.
    """
    planner = flow.planner
    assert isinstance(planner, LLMPlanner)
    asked = [""]
    if planner.nearest_examples is not None:  # each question is shown other examples: the longest must fit
        asked = worked_examples(planner.examples).questions
    prompts = (planner.messages(Query(text), flow.toolset, Memory(), flow.max_turns, "") for text in asked)
    try:
        smallest = max(sum(map(len, engine.encode(messages))) for messages in prompts)
    except ValueError as error:
        raise RecipeError(f"model.name = {recipe.model.name}: {error}; set model.chat_template=false") from None
    need = smallest + recipe.agent.memory_tokens + recipe.agent.planner.max_tokens
    if need > engine.context_length:
        raise RecipeError(
            f"model.context_length = {recipe.model.context_length}: the planner's prompt takes {smallest} tokens "
            f"without question and memory, agent.memory_tokens {recipe.agent.memory_tokens}, agent.planner.max_tokens "
            f"{recipe.agent.planner.max_tokens}; set model.context_length to {need + 64} or more"
        )


def local_engine(recipe: Recipe, loaded: LoadedModel, around: Callable[[], object] | None = None) -> LocalEngine:
    """An engine on `loaded` with the recipe's settings."""
    from midflight.engines.local import LocalEngine

    model = recipe.model
    try:
        return LocalEngine(
            loaded,
            chat_template=model.chat_template,
            context_length=model.context_length,
            max_batch=model.max_batch,
            prefix_tokens=model.prefix_tokens,
            continuous=model.continuous_batching,
            around=around,
        )
    except ValueError as error:
        raise UserError(f"model.name = {model.name}: {error}") from error


def build_agent(
    recipe: Recipe,
    model: str | None = None,
    *,
    tools: Sequence[Tool] | None = None,
    training: bool = False,
    progress: Progress | None = None,
) -> Built:
    """An agent for solving and evaluating.

    Args:
        recipe: what the agent is made of.
        model: instead of `recipe.model.name`: a run folder, a checkpoint, a model folder or a Hub name. The planner
            is then this model also where the recipe names a vLLM server for it: that has the weights of before.
        tools: the caller's own tools that the recipe names.
        training: the planner draws at the training temperature.
        progress: where to say that a newer checkpoint of a run was passed over; standard error by default.

    Raises:
        UserError: the model cannot be loaded or the prompt does not fit.
    """
    found: Named | None = None
    frozen: Engine | None = None

    def asked(name: str | None) -> Engine | None:
        return frozen if name is None or found is None else found.by_name[name]

    with ExitStack() as made:  # closed again where a later step fails
        toolset = toolset_of(recipe, tools, asked)
        made.callback(toolset.close)
        say = (progress or Progress()).note
        named = found = engines_of(recipe, say)
        made.callback(close_all, named.closing)
        engine = recipe.agent.planner_engine
        trains = engine is None or (model is not None and recipe.engines[engine].provider == "vllm")
        if not trains:
            if model is not None and not has_frozen_models(recipe):
                raise UserError(f"--model {model}: does nothing, as every module names an engine of the recipe")
            base, local = model or recipe.model.name, None
        else:
            planner_model, base = load_trained(recipe, model or recipe.model.name, say)
            local = local_engine(recipe, planner_model)
            made.callback(close_all, [local])
        own = local
        if has_frozen_models(recipe) and (local is None or base != local.name):
            own = local_engine(recipe, load_named(recipe, base))
            made.callback(close_all, [own])
        frozen = own
        planner = local or named.of.get("planner")
        assert planner is not None, "it has an engine of its own or the recipe's model"
        flow = assemble(recipe, toolset, planner, frozen, training=training, own=named.of)
        if local is not None:
            check_prompt_fits(recipe, flow, local)
        made.pop_all()
    closing = [engine for engine in (local, own) if engine is not None]
    return Built(flow, (*dict.fromkeys(closing), *named.closing), named.ledger)


@dataclass(frozen=True)
class Named:
    """The engines that a recipe names, by module and by their names, with what is to be closed behind them."""

    of: Mapping[str, Engine]
    closing: tuple[Closable, ...]
    ledger: Ledger
    by_name: Mapping[str, Engine] = field(default_factory=dict)
    """As tools use them."""


def engines_of(recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> Named:
    """What the recipe's `engines` are for each module that names one; those that share one share its connections.

    Raises:
        UserError: an environment variable is missing, or a model cannot be loaded.
    """
    ledger = Ledger(tokens=recipe.budget.tokens, money=recipe.budget.money)
    made: dict[str, LocalEngine | ServedEngine] = {}
    closing: list[Closable] = []
    with ExitStack() as opened:
        opened.callback(close_all, closing)
        for line in unhidden(recipe.engines.values()):
            say(line)
        for name in recipe.engines:
            made[name], closed = _engine(recipe, name, ledger, say)
            closing += closed
        opened.pop_all()
    modules = recipe.agent.language_models.items()
    of = {module: _used(made[one.engine], module) for module, one in modules if one.engine is not None}
    return Named(of, tuple(closing), ledger, {name: _used(engine, "tools") for name, engine in made.items()})


def _keys(recipe: Recipe) -> list[str]:
    """Of all engines: a server may have seen another's."""
    return [key_from(engine.key_variable) for engine in recipe.engines.values() if engine.key_variable is not None]


def _engine(
    recipe: Recipe, name: str, ledger: Ledger, say: Callable[[str], None]
) -> tuple[LocalEngine | ServedEngine, Sequence[Closable]]:
    """One of the recipe's `engines`, and what is to be closed behind it."""
    settings = recipe.engines[name]
    if settings.provider != "local":
        return remote_engine(name, settings, ledger, _keys(recipe), say)
    say(f"loading {settings.model}")
    own = recipe.model.model_copy(update={"name": settings.model, "context_length": settings.context_length})
    other = recipe.model_copy(update={"model": own})
    loaded = local_engine(other, load_trained(other, settings.model, say)[0])
    return loaded, [loaded]


def _used(engine: LocalEngine | ServedEngine, user: str) -> Engine:
    return engine.for_module(user) if isinstance(engine, ServedEngine) else engine


def tool_engine(
    recipe: Recipe, name: str | None, say: Callable[[str], None] = lambda _: None
) -> tuple[Engine, Sequence[Closable]]:
    """The language model of one tool alone, by the name in its options, and what is to be closed behind it.

    Raises:
        UserError: the recipe has no engine of that name, or it cannot be had.
    """
    if name is None:
        loaded, base = load_trained(recipe, recipe.model.name, say)
        own = local_engine(recipe, loaded if base == loaded.name else load_named(recipe, base))
        return own, [own]
    if name not in recipe.engines:
        raise UserError(
            f"engine = {name}: the recipe has no such engine; it has: {', '.join(recipe.engines) or 'none'}"
        )
    for line in unhidden([recipe.engines[name]]):
        say(line)
    ledger = Ledger(tokens=recipe.budget.tokens, money=recipe.budget.money)
    engine, closing = _engine(recipe, name, ledger, say)
    return _used(engine, "tools"), closing
