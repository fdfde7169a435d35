"""Keys of a recipe's file that an override makes idle are left out and said; other idle keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.recipe import RecipeError, load_recipe
from midflight.recipe.config import ModelConfig
from midflight.recipe.tool_rules import tool_engines

ON_A_SERVER = [
    "engines.s.provider=openai",
    "engines.s.base_url=http://127.0.0.1:1/v1",
    "engines.s.model=m",
    *(f"agent.{module}.engine=s" for module in ("planner", "executor", "verifier", "generator")),
]
UNUSED = "model.context_length: does nothing, as every module names an engine"
FULL = """\
name: full
model: {context_length: 4096}
engines:
  judge: {provider: openai, model: m, base_url: "http://127.0.0.1:1/v1", prompt_price: 1, structured: json_schema}
budget: {money: 2}
agent:
  planner: {examples: examples.txt, nearest_examples: 1, max_tokens: 48}
  executor: {kind: llm, max_tokens: 40}
  verifier: {kind: llm, engine: judge}
  generator: {kind: last_result}
  query_analysis: true
  analyst: {max_tokens: 50}
  max_turns: 5
  max_calls: 3
  tools: [python, calculator]
  tool_options:
    calculator: {max_calls: 2}
  sandbox: {wall_seconds: 5}
train_tasks: {family: atlas, split: validation}
training:
  clip_epsilon: 0.1
  max_drift: 0.5
  warmup_steps: 3
  final_rate: 0.5
  curriculum: {floor: 0.3}
"""


@pytest.fixture
def full(tmp_path: Path) -> str:
    (tmp_path / "examples.txt").write_text("Question: a\nTool: finish\n")
    (tmp_path / "own.jsonl").write_text('{"id": "q", "question": "a", "answer": "b", "checker": "exact"}\n')
    file = tmp_path / "full.yaml"
    file.write_text(FULL)
    load_recipe(str(file))
    return str(file)


@pytest.mark.parametrize("name", ["research", "coding", "chemistry"])
def test_a_shipped_recipe_goes_onto_a_server(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(name, ON_A_SERVER, training=False)
    assert recipe.model == ModelConfig() and recipe.agent.tools == load_recipe(name).agent.tools
    assert capsys.readouterr().err == f"{UNUSED}; left out\n"
    assert tool_engines(recipe) == ({"s"} if name == "research" else set())


@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (
            ["agent.executor.kind=direct"],
            ["agent.executor.max_tokens = 40: does nothing with agent.executor.kind = direct"],
        ),
        (["agent.query_analysis=false"], ["agent.analyst: does nothing with agent.query_analysis = false"]),
        (["agent.planner.examples=null"], ["agent.planner.nearest_examples = 1: there are no examples to choose from"]),
        (
            ["agent.max_turns=3"],
            ["agent.max_calls = 3: does nothing, as agent.max_turns = 3 bounds the calls, one a turn"],
        ),
        (
            ["agent.tools=[python]"],
            ["agent.tool_options.calculator: agent.tools does not have it"],
        ),
        (
            ["agent.tools=[calculator]"],
            [
                "agent.sandbox: does nothing without one of the tools python, write_file, read_file, list_files, "
                "run_tests, shell"
            ],
        ),
        (
            ["agent.verifier.kind=rule"],
            [
                "agent.verifier.engine = judge: does nothing with agent.verifier.kind = rule",
                "engines.judge: nothing uses it",
                "budget.money = 2: does nothing, as no engine is on a server",
            ],
        ),
        (
            ["engines.judge.provider=vllm"],
            ["engines.judge.structured = json_schema: does nothing with provider vllm"],
        ),
        (
            ["train_tasks.family=own.jsonl"],
            [
                "train_tasks.split = validation: does nothing for a task file, which is one fixed list",
                "training.curriculum: has one kind to choose from (task)",
            ],
        ),
        (["train_tasks.kinds=[capital]"], ["training.curriculum: has one kind to choose from (capital)"]),
        (
            ["training.steps=1"],
            [
                "training.warmup_steps = 3: the rate is reached in the step after them, and training.steps = 1",
                "training.final_rate = 0.5: does nothing, as the rate is reached in the last step (training.steps = 1)",
            ],
        ),
        (["training.loss=reinforce"], ["training.clip_epsilon = 0.1: does nothing with training.loss = reinforce"]),
    ],
)
def test_what_an_override_makes_idle_is_left_out_and_said(
    full: str,
    overrides: list[str],
    left_out: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(full).parent)
    load_recipe(full, overrides)
    assert capsys.readouterr().err.splitlines() == [f"{line}; left out" for line in left_out]


def test_a_terminal_has_nothing_to_act_on_in_what_is_left_out(full: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(full).write_text(
        FULL.replace("provider: openai", 'provider: vllm, tokenizer: "\\e[31mx"').replace(
            ", structured: json_schema", ""
        )
    )
    load_recipe(full, ["engines.judge.provider=openai"], training=False)
    assert capsys.readouterr().err == "engines.judge.tokenizer = ?[31mx: does nothing with provider openai; left out\n"


@pytest.mark.parametrize(
    "given", ["model.context_length=4096", "model={context_length: 4096}", "model.context_length = 4096"]
)
def test_what_an_override_sets_is_refused_where_it_is_idle(given: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("coding", [*ON_A_SERVER, given], training=False)
    assert str(caught.value) == f"{UNUSED}; remove it, or set agent.planner.engine=null"


def test_what_the_file_itself_has_idle_is_refused_with_overrides_too(full: str) -> None:
    Path(full).write_text(FULL.replace("clip_epsilon: 0.1", "kl_in: reward\n  kl_beta: 0"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(full, ["agent.max_turns=4"])
    assert str(caught.value) == (
        "training.kl_in = reward: does nothing with training.kl_beta = 0.0; remove it or set training.kl_beta=0.001"
    )
