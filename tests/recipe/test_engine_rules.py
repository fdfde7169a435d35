"""Engines in a recipe: what is right loads, and what is wrong says so in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midflight.recipe import RecipeError, load_recipe
from midflight.recipe.engine_rules import asked_at_once, too_slow
from midflight.recipe.resuming import first_change

SERVED = """\
name: served
engines:
  judge: {provider: openai, model: m, base_url: "http://127.0.0.1:1/v1", key_variable: JUDGE_KEY}
agent:
  planner: {engine: judge, max_tokens: 200}
  executor: {kind: direct}
  verifier: {kind: llm, engine: judge}
  generator: {kind: llm, engine: judge}
  tools: [calculator]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "served.yaml"
    file.write_text(SERVED)
    return file


def refused(recipe: Path, *overrides: str, training: bool = False) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(recipe), overrides, training=training)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_modules_share_an_engine_by_name(recipe: Path) -> None:
    agent = load_recipe(str(recipe), training=False).agent
    assert {name: module.engine for name, module in agent.language_models.items()} == {
        "planner": "judge",
        "verifier": "judge",
        "generator": "judge",
    }
    assert not agent.has_frozen_models


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "agent.verifier.engine=jugde",
            "agent.verifier.engine = jugde: no such engine; did you mean judge? engines of this recipe: judge",
        ),
        (
            "agent.executor.engine=judge",
            "agent.executor.engine = judge: does nothing with agent.executor.kind = direct; remove it or set "
            "agent.executor.kind=llm",
        ),
        (
            "engines.other={provider: local, model: smollm2-135m}",
            "engines.other: nothing uses it; set agent.generator.engine=other, or remove it",
        ),
        (
            "engines.Big={provider: local, model: smollm2-135m}",
            "engines.Big: an engine's name is of small letters, digits, '_' and '-'; rename it",
        ),
        ("engines.judge=sk-1", "engines.judge: must be a section of key: value pairs"),
        (
            "engines.judge.provider=gpt",
            "engines.judge.provider = gpt: must be 'openai', 'vllm', 'litellm' or 'local'",
        ),
        ("engines.judge.modle=m", "engines.judge.modle: unknown key; did you mean engines.judge.model?"),
        ("engines.judge.api_key=sk-1", "engines.judge.api_key: unknown key; did you mean engines.judge.api?"),
        ("engines.judge.key_variable=[sk-1]", "engines.judge.key_variable = ...: must be a valid string; quote it"),
        (
            "engines.judge.key_variable.sk-1=1",
            "engines.judge.key_variable: it is a value, not a section; set engines.judge.key_variable itself",
        ),
        ("engines.judge.base_url=[http://sk-1@h]", "engines.judge.base_url = ...: must be a valid string; quote it"),
        ("engines.judge.retries=-1", "engines.judge.retries = -1: must be greater than or equal to 0"),
        (
            "engines.judge.base_url=null",
            "engines.judge.base_url: missing; set where the server is, such as http://127.0.0.1:8000/v1",
        ),
        (
            "engines.judge.base_url=localhost:8000",
            "engines.judge.base_url: must be http://host or https://host, with port and path where needed, in ASCII",
        ),
        *(
            (
                f"engines.judge.base_url={url}",
                "engines.judge.base_url: must be http://host or https://host, with port and path where needed, in "
                "ASCII",
            )
            for url in ("http://h/é", "http://h/a b", "http://é/v1")
        ),
        (
            "engines.judge.base_url=http://a..b/v1",
            "engines.judge.base_url: must be http://host or https://host, with port and path where needed, in ASCII",
        ),
        (
            "engines.judge.base_url=https://me:secret@host/v1",
            "engines.judge.base_url: has a user, a query or a fragment; give the key by key_variable alone",
        ),
        *(
            (
                f"engines.judge.{pace}_per_minute=1e-310",
                f"engines.judge.{pace}_per_minute = 1.0e-310: must be greater than or equal to 0.000001",
            )
            for pace in ("requests", "tokens")
        ),
        ("engines.judge.tokenizer=m", "engines.judge.tokenizer = m: does nothing with provider openai; remove it"),
        (
            "engines.judge.total_seconds=5",
            "engines.judge.attempt_seconds = 60: more than total_seconds = 5, so it would never be reached; set "
            "engines.judge.attempt_seconds to 5 or less, or total_seconds to 60 or more",
        ),
        (
            "agent.max_seconds=100",
            "engines.judge.total_seconds = 100: agent.max_seconds = 100 would end a trajectory first, and so hide that "
            "its server failed; set agent.max_seconds above 100, or engines.judge.total_seconds below it",
        ),
        (
            "engines.judge.context_length=700",
            "engines.judge.context_length = 700: agent.memory_tokens (512) and agent.planner.max_tokens (200) leave no "
            "room for the prompt; set engines.judge.context_length above 712 or lower agent.memory_tokens",
        ),
        (
            "agent.grounded=true",
            "agent.grounded = true: is held by a grammar, and judge takes none; set agent.grounded=false, or "
            "engines.judge.structured=grammar where its server takes them",
        ),
        (
            "agent.planner.top_k=5",
            "agent.planner.top_k = 5: provider openai has no such setting; set 0, or agent.planner.top_p",
        ),
        (
            "model.dtype=bfloat16",
            "model.dtype: does nothing, as every module names an engine; remove it, or set agent.planner.engine=null",
        ),
        (
            "budget.money=2",
            "budget.money = 2: would never be spent, as no engine has a price; set engines.judge.prompt_price and "
            "completion_price, or budget.tokens",
        ),
    ],
)
def test_an_engine_that_is_wrong(recipe: Path, override: str, message: str) -> None:
    assert refused(recipe, override) == message


@pytest.mark.parametrize(
    "override",
    ["engine.judge.api_key=sk-1", "engines.judge.api.key=sk-1", "api_keys.judge=sk-1", "engines.judge.token=sk-1"]
    + ["engines.judge.whatever=sk-1", "engines.judge.key_variable={sk-1: 1}", "agent.password=sk-1"],
)
def test_what_may_be_a_key_is_not_shown(recipe: Path, override: str) -> None:
    said = refused(recipe, override)
    assert "sk-1" not in said and ("unknown key" in said or "is a value, not a section" in said), said


def test_a_key_put_in_place_of_its_variable_is_not_repeated(recipe: Path) -> None:
    for key in ("sk-0123456789abcdef", "hf_AbCdEf", "gsk_abc.def"):
        message = refused(recipe, f"engines.judge.key_variable={key}")
        assert key not in message and "give a name, never the key itself" in message


def test_what_cannot_train_is_refused_as_planner_in_training_alone(recipe: Path) -> None:
    load_recipe(str(recipe), training=False)
    assert refused(recipe, training=True) == (
        "agent.planner.engine = judge: provider openai gives no token ids and no log-probs of the drawn distribution, "
        "and without them nothing can train; set agent.planner.engine=null, or give it a vllm engine (midflight solve "
        "and eval take it as it is)"
    )
    load_recipe(str(recipe), ["agent.planner.engine=null"])
    litellm = "engines.judge={provider: litellm, model: openai/m}"
    load_recipe(str(recipe), [litellm], training=False)
    assert refused(recipe, litellm, training=True).startswith(
        "agent.planner.engine = judge: provider litellm gives no token ids and no log-probs"
    )
    local = ["engines.judge={provider: local, model: smollm2-135m}", "agent.verifier.engine=judge"]
    assert refused(recipe, *local, training=True) == (
        "agent.planner.engine = judge: training trains the recipe's model; set agent.planner.engine=null and "
        "model.name=smollm2-135m"
    )


def test_a_vllm_planner_trains_without_truncation(recipe: Path) -> None:
    served = "engines.judge={provider: vllm, model: m, base_url: 'http://h/v1', tokenizer: smollm2-135m}"
    apart = [
        "engines.other={provider: vllm, model: m, base_url: 'http://h/v1', tokenizer: smollm2-135m}",
        "agent.verifier.engine=other",
        "agent.generator.engine=other",
    ]
    load_recipe(str(recipe), [served, *apart])
    tool = ["agent.tools=[generalist]", "agent.tool_options.generalist.engine=judge"]
    for key, overrides in (
        ("agent.verifier", apart[:1] + ["agent.generator.engine=other"]),
        ("agent.generator", apart[:2]),
        ("agent.tool_options.TOOL", apart + tool),
    ):
        assert refused(recipe, served, *overrides, training=True) == (
            f"{key}.engine = judge: is the planner's, which draws from the weights under training; name a second "
            "engine there, with base_url and model as those of engines.judge for the untrained model"
        )
        load_recipe(str(recipe), [served, *overrides], training=False)
    for cut in ("agent.planner.top_p=0.9", "agent.planner.top_k=5"):
        assert "set agent.planner.top_p=1 and agent.planner.top_k=0" in refused(
            recipe, served, *apart, cut, training=True
        )
        load_recipe(str(recipe), [served, *apart, cut], training=False)
    assert refused(recipe, f"{served[:-1]}, structured: grammar}}") == (
        "engines.judge.structured = grammar: does nothing with provider vllm; remove it"
    )


def test_a_resume_may_move_an_engine_and_its_budget_but_not_change_what_it_is(recipe: Path) -> None:
    def change(*overrides: str) -> object:
        before, after = (load_recipe(str(recipe), given, training=False) for given in ((), overrides))
        return first_change(before, after)

    assert change("engines.judge.base_url=http://elsewhere/v1", "engines.judge.retries=9", "budget.tokens=5") is None
    assert change("engines.judge.model=n") == ("engines.judge.model", "m", "n")


def test_the_recipe_of_the_page_on_engines_loads(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    strong, near, sampler = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "strong.yaml").write_text(strong)
    load_recipe(str(tmp_path / "strong.yaml"), tasks=False, training=False)
    rest = (
        "  executor: {kind: direct}\n  verifier: {kind: rule}\n  generator: {kind: last_result}\n"
        "  tools: [calculator]\nname: s\n"
    )
    (tmp_path / "sampler.yaml").write_text(sampler + rest)
    load_recipe(str(tmp_path / "sampler.yaml"))
    planner = "  planner: {}\n" + rest.replace("  tools: [calculator]\n", "")
    (tmp_path / "near.yaml").write_text(near + planner)
    load_recipe(str(tmp_path / "near.yaml"), tasks=False, training=False)


def test_a_budget_needs_a_server(recipe: Path) -> None:
    everywhere = [f"agent.{module}.engine=null" for module in ("planner", "verifier", "generator")]
    text = "\n".join(line for line in SERVED.splitlines() if "judge: {" not in line and line != "engines:")
    recipe.write_text(text)
    assert refused(recipe, *everywhere, "budget.tokens=9") == (
        "budget.tokens = 9: does nothing, as no engine is on a server; remove it"
    )


def test_one_key_names_the_engine_of_all_modules_that_name_none(recipe: Path) -> None:
    unnamed = ["agent.planner.engine=null", "agent.engine=judge"]
    agent = load_recipe(str(recipe), unnamed, training=False).agent
    assert {name: one.engine for name, one in agent.language_models.items()} == dict.fromkeys(
        agent.language_models, "judge"
    )
    assert (agent.planner_engine, agent.tools_engine, agent.has_frozen_models) == ("judge", "judge", False)
    own = [
        *unnamed,
        "engines.other={provider: openai, base_url: http://127.0.0.1:1, model: m}",
        "agent.generator.engine=other",
    ]
    agent = load_recipe(str(recipe), own, training=False).agent
    assert (agent.planner_engine, agent.tools_engine) == ("judge", "other")
    assert load_recipe(str(recipe), ["agent.planner.engine=null"], training=False).agent.planner_engine is None


UNNAMED = SERVED.replace("engine: judge, ", "").replace(", engine: judge", "")
SAMPLER = "sampler: {provider: vllm, model: m, base_url: 'http://h/v1', tokenizer: smollm2-135m}"


def test_what_is_said_of_engines_in_training_leads_to_a_recipe_that_trains(recipe: Path) -> None:
    text = UNNAMED.replace("agent:\n", f"  {SAMPLER}\nagent:\n  engine: sampler\n")
    recipe.write_text(text)
    assert refused(recipe, training=True) == (
        "engines.judge: nothing uses it; set agent.generator.engine=judge, or remove it"
    )
    used = text.replace("generator: {", "generator: {engine: judge, ")
    recipe.write_text(used)
    assert refused(recipe, training=True) == (
        "agent.engine = sampler: is the planner's, which draws from the weights under training; set "
        "agent.planner.engine=sampler, and agent.engine to a second engine, with base_url and model as those of "
        "engines.sampler for the untrained model"
    )
    recipe.write_text(used.replace("engine: sampler", "engine: judge"))
    assert refused(recipe, training=True) == (
        "engines.sampler: nothing uses it; set agent.planner.engine=sampler, or remove it"
    )
    load_recipe(str(recipe), ["agent.planner.engine=sampler"])


def test_an_engine_that_nothing_uses_is_told_a_place_that_takes_it(recipe: Path) -> None:
    recipe.write_text(UNNAMED)
    for training, advice in (
        (False, "set agent.engine=judge, or remove it"),
        (True, "set agent.generator.engine=judge"),
    ):
        assert refused(recipe, training=training).startswith(f"engines.judge: nothing uses it; {advice}")
    recipe.write_text(UNNAMED.replace("verifier: {kind: llm", "verifier: {kind: rule").replace("llm", "last_result"))
    assert refused(recipe, training=True) == "engines.judge: nothing uses it; remove it"


def test_what_is_wrong_with_the_engine_of_all_names_its_key(recipe: Path) -> None:
    null = "agent.planner.engine=null"
    assert refused(recipe, null, "agent.engine=jugde") == (
        "agent.engine = jugde: no such engine; did you mean judge? engines of this recipe: judge"
    )
    assert refused(recipe, null, "agent.engine=judge", training=True).startswith(
        "agent.engine = judge: provider openai gives no token ids"
    )
    assert refused(recipe, "agent.engine=judge") == (
        "agent.engine = judge: does nothing, as every module names an engine; remove it"
    )


def test_a_pace_that_cannot_carry_the_trajectories_at_once_is_warned_of_with_what_to_set(recipe: Path) -> None:
    def said(*overrides: str) -> list[str]:
        settings = load_recipe(str(recipe), overrides, training=False)
        return too_slow(settings, asked_at_once(settings, questions=64))

    assert said("engines.judge.requests_per_minute=96") == said("engines.judge.tokens_per_minute=1e6") == []
    assert said("engines.judge.requests_per_minute=30") == [
        "warning: engines.judge.requests_per_minute = 30: too slow for 64 trajectories at once (evaluation.concurrency)"
        ", which take 384 s with one turn each (3 requests), and agent.max_seconds = 120; set evaluation.concurrency "
        "to 20 or less, or agent.max_seconds above 384"
    ]
    assert said("engines.judge.requests_per_minute=30", "evaluation.concurrency=20") == []
    (line,) = said("engines.judge.tokens_per_minute=100", "evaluation.concurrency=1")
    assert line.endswith(
        "take 235 s with one turn each (392 new tokens), and agent.max_seconds = 120; set agent.max_seconds above 236"
    )
    settings = load_recipe(str(recipe), ["engines.judge.requests_per_minute=30"], training=False)
    together = {**asked_at_once(settings, questions=5), "training.queries_per_step x group_size": 128}
    (line,) = too_slow(settings, together)
    assert "too slow for 128 trajectories at once (training.queries_per_step x group_size), which take 768 s" in line


def test_an_evaluation_has_no_more_at_once_than_it_asks(recipe: Path) -> None:
    given = ["evaluation.trials=3", "evaluation.concurrency=8", "agent.planner.eval_temperature=0.5"]
    settings = load_recipe(str(recipe), given, training=False)
    counts = [asked_at_once(settings, questions) for questions in (0, 2, 100)]
    assert counts == [{"evaluation.concurrency": count} for count in (0, 6, 8)]
