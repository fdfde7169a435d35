"""From a recipe to modules, with stand-ins for models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from midflight import building
from midflight.agent import (
    DirectExecutor,
    LastResultGenerator,
    LLMExecutor,
    LLMGenerator,
    LLMPlanner,
    LLMVerifier,
    RuleVerifier,
)
from midflight.engines.scripted import ScriptedEngine
from midflight.errors import UserError
from midflight.recipe import RecipeError, load_recipe
from tests.agent.doubles import population


def test_the_callers_tool_comes_before_the_built_in_one_of_its_name() -> None:
    own = population()
    toolset = building.toolset_of(load_recipe("quickstart", ["agent.tools=[capital, population]"]), [own])
    assert toolset.names == ("capital", "population", "finish")
    assert toolset.get("population") is own


def test_rule_modules_take_no_engine_and_language_models_take_the_frozen_one() -> None:
    planner, frozen = ScriptedEngine([]), ScriptedEngine([])
    rules = load_recipe("quickstart", ["agent.planner.temperature=0.7", "agent.planner.eval_temperature=0.1"])
    assert not rules.agent.has_frozen_models
    for training, temperature in ((True, 0.7), (False, 0.1)):
        flow = building.assemble(rules, building.toolset_of(rules), planner, None, training=training)
        assert (flow.executor, flow.verifier, flow.generator) == (
            DirectExecutor(),
            RuleVerifier(),
            LastResultGenerator(),
        )
        assert isinstance(flow.planner, LLMPlanner)
        assert (flow.planner.engine, flow.planner.sampling.temperature) == (planner, temperature)
        assert flow.grounded and flow.planner.grounded and flow.planner.nearest_examples == 1
        assert (
            flow.max_calls is None
            and flow.max_turns == rules.agent.max_turns
            and flow.memory_tokens == rules.agent.memory_tokens
        )
    models = load_recipe("four-llm", ["agent.verifier.max_tokens=33", "agent.query_analysis=true", "agent.max_calls=3"])
    assert models.agent.has_frozen_models
    flow = building.assemble(models, building.toolset_of(models), planner, frozen, training=True)
    for module, kind in ((flow.executor, LLMExecutor), (flow.verifier, LLMVerifier), (flow.generator, LLMGenerator)):
        assert isinstance(module, kind) and module.engine is frozen  # type: ignore[attr-defined]
    assert isinstance(flow.verifier, LLMVerifier) and flow.verifier.sampling.max_tokens == 33
    assert flow.analyst is not None and flow.max_calls == 3


def test_a_context_below_the_smallest_prompt_is_refused() -> None:
    recipe = load_recipe("quickstart", ["agent.memory_tokens=100", "agent.planner.max_tokens=20"])
    flow = building.assemble(recipe, building.toolset_of(recipe), ScriptedEngine([]), None, training=True)

    def engine(context: int) -> Any:
        return SimpleNamespace(encode=lambda messages: [[0] * 400, [0] * 3], context_length=context)

    building.check_prompt_fits(recipe, flow, engine(523))
    with pytest.raises(RecipeError) as caught:
        building.check_prompt_fits(recipe, flow, engine(522))
    assert str(caught.value) == (
        f"model.context_length = {recipe.model.context_length}: the planner's prompt takes 403 tokens without question "
        "and memory, agent.memory_tokens 100, agent.planner.max_tokens 20; set model.context_length to 587 or more"
    )


def test_a_chat_template_that_takes_no_prompt_is_refused() -> None:
    recipe = load_recipe("quickstart", ["model.chat_template=true"])
    flow = building.assemble(recipe, building.toolset_of(recipe), ScriptedEngine([]), None, training=True)

    def encode(messages: object) -> object:
        raise ValueError("the model's chat template takes no system and user (no)")

    with pytest.raises(RecipeError) as caught:
        building.check_prompt_fits(recipe, flow, SimpleNamespace(encode=encode))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "model.name = smollm2-135m: the model's chat template takes no system and user (no); "
        "set model.chat_template=false"
    )


def test_the_longest_nearest_example_has_to_fit() -> None:
    recipe = load_recipe("quickstart")
    flow = building.assemble(recipe, building.toolset_of(recipe), ScriptedEngine([]), None, training=True)
    sizes = []

    def encode(messages: Any) -> list[list[int]]:
        sizes.append(sum(len(part) for message in messages for part in message.parts))
        return [[0] * sizes[-1]]

    room = recipe.agent.memory_tokens + recipe.agent.planner.max_tokens
    building.check_prompt_fits(recipe, flow, SimpleNamespace(encode=encode, context_length=10_000))  # type: ignore[arg-type]
    assert len(sizes) == 17 and len(set(sizes)) > 1
    with pytest.raises(RecipeError, match=rf"prompt takes {max(sizes)} tokens"):
        building.check_prompt_fits(
            recipe,
            flow,
            SimpleNamespace(encode=encode, context_length=max(sizes) + room - 1),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(("training", "temperature"), [(False, 0.1), (True, 0.7)])
def test_an_agent_draws_as_in_evaluation_unless_it_is_to_draw_as_in_training(
    monkeypatch: pytest.MonkeyPatch, training: bool, temperature: float
) -> None:
    monkeypatch.setattr(building, "load_trained", lambda recipe, name, say: (SimpleNamespace(name=name), name))
    monkeypatch.setattr(building, "local_engine", lambda recipe, loaded: ScriptedEngine([]))
    monkeypatch.setattr(building, "check_prompt_fits", lambda recipe, flow, engine: None)
    recipe = load_recipe("quickstart", ["agent.planner.temperature=0.7", "agent.planner.eval_temperature=0.1"])
    planner = building.build_agent(recipe, training=training).flow.planner
    assert isinstance(planner, LLMPlanner) and planner.sampling.temperature == temperature


def test_modules_that_name_an_engine_have_it_and_the_others_the_recipes_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, int]] = []

    def local_engine(recipe: Any, loaded: Any) -> Any:
        made.append((recipe.model.name, recipe.model.context_length))
        return ScriptedEngine([], name=recipe.model.name)

    monkeypatch.setattr(building, "load_trained", lambda recipe, name, say: (SimpleNamespace(name=name), name))
    monkeypatch.setattr(building, "local_engine", local_engine)
    monkeypatch.setattr(building, "check_prompt_fits", lambda recipe, flow, engine: None)
    monkeypatch.setenv("JUDGE_KEY", "k")
    served = "{provider: openai, model: m, base_url: 'http://127.0.0.1:1/v1', key_variable: JUDGE_KEY}"
    recipe = load_recipe(
        "four-llm",
        [
            f"engines.judge={served}",
            "engines.big={provider: local, model: org/big, context_length: 5000}",
            "agent.verifier.engine=judge",
            "agent.generator.engine=big",
            "agent.query_analysis=true",
            "agent.analyst.engine=judge",
        ],
    )
    built = building.build_agent(recipe)
    assert made == [("org/big", 5000), ("smollm2-135m", 4096)]
    flow: Any = built.flow
    assert flow.planner.engine is flow.executor.engine and flow.planner.engine.name == "smollm2-135m"
    assert flow.generator.engine.name == "org/big" and flow.verifier.engine.name == "judge"
    assert flow.verifier.engine.client is flow.analyst.engine.client  # one pool, limits and key
    assert (flow.verifier.engine._module, flow.analyst.engine._module) == ("verifier", "analyst")
    assert {engine.name for engine in built.engines} == {"smollm2-135m", "org/big"}  # type: ignore[attr-defined]


def test_a_trained_model_is_the_planner_in_place_of_the_server_that_drew_for_its_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Server(ScriptedEngine):
        pass

    served = building.Named({"planner": Server([], name="server")}, (), building.Ledger())
    monkeypatch.setattr(building, "engines_of", lambda recipe, say: served)
    monkeypatch.setattr(building, "load_trained", lambda recipe, name, say: (SimpleNamespace(name=name), "base"))
    monkeypatch.setattr(building, "local_engine", lambda recipe, loaded: ScriptedEngine([], name=loaded.name))
    monkeypatch.setattr(building, "check_prompt_fits", lambda recipe, flow, engine: None)
    engine = "{provider: vllm, model: m, base_url: 'http://127.0.0.1:1/v1', tokenizer: smollm2-135m}"
    recipe = load_recipe("quickstart", [f"engines.sampler={engine}", "agent.planner.engine=sampler"])
    for model, name in (("runs/x", "runs/x"), (None, "server")):
        planner: Any = building.build_agent(recipe, model).flow.planner
        assert planner.engine.name == name


class Held:
    """Says whether it is closed."""

    name, context_length = "held", 1000

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("failing", ["engines_of", "load_trained", "local_engine", "assemble", "check_prompt_fits", ""])
def test_what_was_made_is_closed_where_a_later_step_fails(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    toolset, server, local = Held(), Held(), Held()
    made: dict[str, Any] = {
        "toolset_of": toolset,
        "engines_of": building.Named({}, (server,), building.Ledger()),
        "load_trained": (SimpleNamespace(name="m"), "held"),
        "local_engine": local,
        "assemble": SimpleNamespace(toolset=toolset),
        "check_prompt_fits": None,
    }

    def step(name: str) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            if name == failing:
                raise UserError("no")
            return made[name]

        return run

    for name in made:
        monkeypatch.setattr(building, name, step(name))
    recipe = load_recipe("quickstart")
    if failing:
        with pytest.raises(UserError, match="no"):
            building.build_agent(recipe)
    else:
        building.build_agent(recipe).close()
    order = list(made)
    reached = order.index(failing) if failing else len(order)
    assert [toolset.closed, server.closed, local.closed] == [1, int(reached > 1), int(reached > 3)]


def test_engines_that_were_made_are_closed_where_another_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Held()

    def remote(name: str, settings: Any, ledger: Any, *more: Any) -> Any:
        if name == "two":
            raise UserError("no key")
        return ScriptedEngine([]), [server]

    monkeypatch.setattr(building, "remote_engine", remote)
    engine = "{provider: openai, model: m, base_url: 'http://127.0.0.1:1/v1'}"
    recipe = load_recipe(
        "quickstart",
        [
            f"engines={{one: {engine}, two: {engine}}}",
            "agent.verifier={kind: llm, engine: one}",
            "agent.generator={kind: llm, engine: two}",
        ],
    )
    with pytest.raises(UserError, match="no key"):
        building.engines_of(recipe)
    assert server.closed == 1


def test_each_engine_takes_out_the_keys_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def remote(name: str, settings: Any, ledger: Any, others: list[str], say: Any) -> Any:
        given.append((name, others))
        return ScriptedEngine([]), []

    monkeypatch.setattr(building, "remote_engine", remote)
    monkeypatch.setenv("ONE_KEY", "sk-one-1234")
    monkeypatch.setenv("TWO_KEY", "sk-two-1234")
    engine = "provider: openai, model: m, base_url: 'http://127.0.0.1:1/v1', key_variable:"
    recipe = load_recipe(
        "quickstart",
        [
            f"engines={{one: {{{engine} ONE_KEY}}, two: {{{engine} TWO_KEY}}}}",
            "agent.verifier={kind: llm, engine: one}",
            "agent.generator={kind: llm, engine: two}",
        ],
    )
    building.engines_of(recipe)
    assert given == [(name, ["sk-one-1234", "sk-two-1234"]) for name in ("one", "two")]
