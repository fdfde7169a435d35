"""From a recipe to a running agent: tools, engines, the four modules, the flow."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from midflight.config import ModuleConfig, Recipe, RecipeError
from midflight.engines.base import Engine, Sampling
from midflight.engines.local import LoadedModel, LocalEngine, ModelError, load
from midflight.engines.local.models import has_device
from midflight.errors import UserError
from midflight.progress import Progress
from midflight.store import RunFolder
from midflight.store.seals import STATE, fault, newest_whole
from midflight.tool_rules import has_frozen_models
from midflight.tools import ToolContext, make_toolset
from midflight.tools.base import Tool, Toolset


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide PEFT's FutureWarning about transformers: no reader can act on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@dataclass(frozen=True)
class Built:
    """A ready agent. `close` ends its engines' workers and what its tools hold."""

    flow: AgentFlow
    engines: tuple[LocalEngine, ...]

    def close(self) -> None:
        self.flow.toolset.close()
        for engine in self.engines:
            engine.close()


def toolset_of(
    recipe: Recipe, tools: Sequence[Tool] | None = None, engine: Callable[[str | None], Engine | None] = lambda _: None
) -> Toolset:
    """The recipe's tools; `tools` are the caller's own, found by name before the built-in ones.

    `engine` gives the language model of tools that ask one, when they first do, by the name in their options.
    """

    def ask(name: str | None) -> Engine:
        found = engine(name)
        if found is None:
            raise UserError("a tool asks a language model, and there is none beside the planner's")
        return found

    context = ToolContext(engine=ask)
    return make_toolset(recipe.agent.tools, recipe.agent.tool_options, context, tools or (), recipe.agent.mcp_servers)


def assemble(recipe: Recipe, toolset: Toolset, planner: Engine, frozen: Engine | None, *, training: bool) -> AgentFlow:
    """The flow of `recipe`: the planner on its engine, all other language models on `frozen`."""
    agent = recipe.agent
    examples = Path(agent.planner.examples).read_text(encoding="utf-8") if agent.planner.examples else ""
    temperature = agent.planner.temperature if training else agent.planner.eval_temperature

    def sampling(module: ModuleConfig) -> Sampling:
        return Sampling(temperature=module.temperature, max_tokens=module.max_tokens)

    def other() -> Engine:
        assert frozen is not None, "has_frozen_models says that an engine is needed"
        return frozen

    return AgentFlow(
        LLMPlanner(
            planner,
            format=agent.planner.format,
            examples=examples,
            nearest_examples=agent.planner.nearest_examples,
            grammar=agent.planner.grammar,
            grounded=agent.grounded,
            sampling=Sampling(
                temperature=temperature,
                top_p=agent.planner.top_p,
                top_k=agent.planner.top_k,
                max_tokens=agent.planner.max_tokens,
            ),
        ),
        LLMExecutor(other(), sampling(agent.executor)) if agent.executor.kind == "llm" else DirectExecutor(),
        LLMVerifier(other(), sampling(agent.verifier)) if agent.verifier.kind == "llm" else RuleVerifier(),
        LLMGenerator(other(), sampling(agent.generator)) if agent.generator.kind == "llm" else LastResultGenerator(),
        toolset,
        max_turns=agent.max_turns,
        max_seconds=agent.max_seconds,
        memory_tokens=agent.memory_tokens,
        tool_seconds=agent.tool_seconds,
        grounded=agent.grounded,
        analyst=LLMAnalyst(other(), sampling(agent.analyst)) if agent.query_analysis else None,
    )


def check_prompt_fits(recipe: Recipe, flow: AgentFlow, engine: LocalEngine) -> None:
    """Refuse a context that cannot hold the smallest prompt, a full memory and one action.

    Raises:
        RecipeError: one line with what to set.
    """
    planner = flow.planner
    assert isinstance(planner, LLMPlanner)
    asked = [""]
    if planner.nearest_examples is not None:  # each question is shown other examples: the longest must fit
        asked = worked_examples(planner.examples).questions
    prompts = (planner.messages(Query(text), flow.toolset, Memory(), flow.max_turns, "") for text in asked)
    smallest = max(sum(map(len, engine.encode(messages))) for messages in prompts)
    need = smallest + recipe.agent.memory_tokens + recipe.agent.planner.max_tokens
    if need > engine.context_length:
        raise RecipeError(
            f"model.context_length = {recipe.model.context_length}: the planner's prompt takes {smallest} tokens "
            f"without question and memory, agent.memory_tokens {recipe.agent.memory_tokens}, agent.planner.max_tokens "
            f"{recipe.agent.planner.max_tokens}; set model.context_length to {need + 64} or more"
        )


def local_engine(recipe: Recipe, loaded: LoadedModel, around: Callable[[], object] | None = None) -> LocalEngine:
    """An engine on `loaded` with the recipe's settings."""
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
        model: instead of `recipe.model.name`: a run folder, a checkpoint, a model folder or a Hub name.
        tools: the caller's own tools that the recipe names.
        training: the planner draws at the training temperature.
        progress: where to say that a newer checkpoint of a run was passed over; standard error by default.

    Raises:
        UserError: the model cannot be loaded or the prompt does not fit.
    """
    toolset = toolset_of(recipe, tools, lambda _: frozen)
    planner_model, base = load_trained(recipe, model or recipe.model.name, (progress or Progress()).note)
    planner = local_engine(recipe, planner_model)
    engines = [planner]
    frozen = None
    if has_frozen_models(recipe):
        same = base == planner_model.name
        frozen = planner if same else local_engine(recipe, load_named(recipe, base))
        engines += [] if same else [frozen]
    flow = assemble(recipe, toolset, planner, frozen, training=training)
    check_prompt_fits(recipe, flow, planner)
    return Built(flow, tuple(engines))


def load_named(recipe: Recipe, name: str) -> LoadedModel:
    """A plain model with the recipe's dtype and device.

    Raises:
        UserError: it cannot be loaded, or this machine has no such device.
    """
    device = recipe.model.device
    if not has_device(device):
        raise UserError(f"model.device = {device}: torch finds none on this machine; set model.device=auto")
    return load(name, dtype=recipe.model.dtype, device=recipe.model.device)


def load_trained(recipe: Recipe, name: str, say: Callable[[str], None]) -> tuple[LoadedModel, str]:
    """A model by any name a user may give, adapters merged in; and the name of the model all training began with.

    `say` gets a line for each checkpoint of a run that is passed over.
    """
    folder = Path(name)
    if (folder / "recipe.yaml").is_file():
        folder = trained_folder(folder, say)
    elif (folder / STATE).is_file() and (reason := fault(folder)):
        raise ModelError(f"model.name={name}: the checkpoint is not whole ({reason}); name another, or its run")
    base = _base_of(folder)
    if base is not None and Path(base).resolve() == folder.resolve():
        raise ModelError(f"model.name={name}: it names itself as its base; mend adapter_config.json")
    if not (folder / "adapter_config.json").is_file():
        name = str(folder) if folder.is_dir() else name
        return load_named(recipe, name), _root_of(base) if base is not None else name
    from peft import PeftModel

    assert base is not None, "an adapter names its base"
    loaded, root = load_trained(recipe, base, say)
    with quiet_peft():
        merged = PeftModel.from_pretrained(loaded.model, str(folder)).merge_and_unload()
    return LoadedModel(str(folder), merged.eval().requires_grad_(False), loaded.tokenizer, loaded.device), root


def trained_folder(run: Path, say: Callable[[str], None]) -> Path:
    """The newest whole checkpoint of a run folder.

    Raises:
        UserError: it has none.
    """
    newest = newest_whole(RunFolder(run).checkpoints, say)
    if newest is None:
        raise ModelError(f"--model {run}: the run has no checkpoint yet; let it train, or name another model")
    return newest


def _base_of(folder: Path) -> str | None:
    """What a checkpoint or an adapter was trained from; None for a plain model."""
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("state.json", "base")):
        if (folder / file).is_file():
            return str(json.loads((folder / file).read_text())[key])
    return None


def _root_of(name: str) -> str:
    """The model all training began with, from one that was trained from another."""
    base = _base_of(Path(name))
    return name if base is None else _root_of(base)
