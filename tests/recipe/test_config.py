"""Recipes: what is right loads, and what is wrong says so in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from midflight.errors import UserError
from midflight.recipe import Recipe, RecipeError, load_recipe, resolved
from midflight.recipe.reading import _parse, read_yaml, shipped
from midflight.recipe.rules import check
from midflight.recipe.validating import COMMON_NAMES, key_paths, show, validate
from midflight.tools import BUILTIN, ToolOptions
from midflight.tools.mcp import McpServer

MINIMAL = """\
name: small
agent:
  executor: {kind: direct}
  verifier: {kind: rule}
  generator: {kind: last_result}
  tools: [calculator]
"""


def refused(path: str | Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recipe_is_valid_and_survives_being_resolved(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert validate(resolved(recipe)) == recipe
    check(validate(resolved(recipe)))


def test_both_shipped_recipes_exist() -> None:
    assert {"quickstart", "four-llm"} <= set(shipped())


def test_overrides_are_yaml_and_the_last_one_wins(small: Path) -> None:
    recipe = load_recipe(
        str(small),
        [
            "training.learning_rate=1e-5",
            "agent.tools=[calculator, capital]",
            "model.lora=null",
            "training.betas=[0.8, 0.99]",
            "training.steps=3",
            "training.steps=4",
            "training.curriculum.floor=0.5",
        ],
    )
    assert recipe.training.learning_rate == 1e-5
    assert recipe.agent.tools == ("calculator", "capital")
    assert recipe.model.lora is None
    assert recipe.training.betas == (0.8, 0.99)
    assert recipe.training.steps == 4
    assert recipe.training.curriculum is not None and recipe.training.curriculum.floor == 0.5


def test_a_partial_eval_section_keeps_the_held_out_split(small: Path) -> None:
    recipe = load_recipe(str(small), ["eval_tasks.count=60"])
    assert (recipe.eval_tasks.split, recipe.eval_tasks.count) == ("test", 60)


def test_paths_are_relative_to_the_recipe_and_in_overrides_to_the_current_folder(tmp_path: Path, small: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "shots.txt").write_text("an example")
    (folder / "r.yaml").write_text(MINIMAL.replace("agent:\n", "agent:\n  planner: {examples: shots.txt}\n"))
    assert load_recipe("there/r.yaml").agent.planner.examples == str(folder / "shots.txt")
    (tmp_path / "here.txt").write_text("an example")
    over = load_recipe("there/r.yaml", ["agent.planner.examples=here.txt"])
    assert over.agent.planner.examples == str(tmp_path / "here.txt")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rat=1", "training.learning_rat = 1: unknown key; did you mean training.learning_rate?"),
        ("agent.planer.format=full", "agent.planer.format = full: unknown key; did you mean agent.planner.format?"),
        ("agent.planner.formt=full", "agent.planner.formt = full: unknown key; did you mean agent.planner.format?"),
        ("training.max_turns=3", "training.max_turns = 3: unknown key; did you mean agent.max_turns?"),
        (
            "colour=red",
            "colour = red: unknown key; valid keys of a recipe: name, seed, model, engines, budget, agent, "
            "train_tasks, eval_tasks, training, sft, evaluation",
        ),
        ("training.lr=1", "training.lr = 1: unknown key; did you mean training.learning_rate?"),
        ("batch_size=4", "batch_size = 4: unknown key; did you mean training.queries_per_step?"),
        (
            "agent.executor.max_new_tokens=9",
            "agent.executor.max_new_tokens = 9: unknown key; did you mean agent.executor.max_tokens?",
        ),
        ("training.beta=0", "training.beta = 0: unknown key; did you mean training.kl_beta?"),
        (
            "training.steps",
            "override training.steps: no '='; write key=value, with no spaces around '=', such as training.steps=10",
        ),
        (
            "=3",
            "override =...: no key before '='; write key=value, with no spaces around '=', such as training.steps=10",
        ),
        ("seed.x=1", "seed.x = 1: seed is a value, not a section; set seed itself"),
        ("agent.planner=3", "agent.planner = 3: must be a section of key: value pairs"),
        ("agent.planner.format=ful", "agent.planner.format = ful: must be 'compact' or 'full'"),
        ("agent.tools=calculator", "agent.tools = calculator: must be a list; write [calculator]"),
        ("training.steps=0", "training.steps = 0: must be greater than or equal to 1"),
        ("training.steps=true", "training.steps = true: must be a number"),
        ("training.learning_rate=.nan", "training.learning_rate = .nan: must be a finite number"),
        ("name=3", "name = 3: must be a valid string; quote it"),
        (
            "training.group_size=1",
            "training.group_size = 1: a group of one always has advantage 0 (its reward is the mean); "
            "set it to 2 or more",
        ),
        (
            "evaluation.trials=3",
            "evaluation.trials = 3: greedy trials are all the same; set agent.planner.eval_temperature above 0 or "
            "evaluation.trials=1",
        ),
        (
            "model.context_length=560",
            "model.context_length = 560: agent.memory_tokens (512) and agent.planner.max_tokens (48) leave no room for "
            "the prompt; set model.context_length above 560 or lower agent.memory_tokens",
        ),
        (
            "training.warmup_steps=20",
            "training.warmup_steps = 20: the rate is reached in the step after them, and training.steps = 20; "
            "set training.warmup_steps to at most 19",
        ),
        (
            "agent.executor.max_tokens=5",
            "agent.executor.max_tokens = 5: does nothing with agent.executor.kind = direct; remove it or set "
            "agent.executor.kind=llm",
        ),
        (
            "agent.tools=[calculator, calculator]",
            "agent.tools = [calculator, calculator]: calculator is listed twice; remove one",
        ),
        (
            "agent.max_calls=5",
            "agent.max_calls = 5: does nothing, as agent.max_turns = 5 bounds the calls, one a turn; set it lower, or "
            "null",
        ),
        ("agent.max_calls=0", "agent.max_calls = 0: must be greater than or equal to 1"),
        ("agent.tools=[finish]", "agent.tools = [finish]: finish is always there; remove it"),
        (
            "train_tasks.split=test",
            "eval_tasks.split = test: also the split that is trained on; set train_tasks.split=train",
        ),
        (
            "eval_tasks.split=train",
            "eval_tasks.split = train: also the split that is trained on; set eval_tasks.split=test",
        ),
        (
            "train_tasks.family=atlsa",
            "train_tasks.family = atlsa: unknown family; did you mean atlas? give atlas or a path to a .jsonl file",
        ),
        (
            "model.dtype=bfloat16",
            "training.max_drift = 0.0001: bfloat16 rounds by more, the run would stop at once; "
            "set training.max_drift=0.05 or model.dtype=float32",
        ),
        ("eval_tasks.count=null", "eval_tasks.count = null: atlas draws without end; set eval_tasks.count=240"),
        ("model.device=gpu", "model.device = gpu: unknown; set auto, cpu, cuda, cuda:0 or mps"),
        (
            "model.name=smollm2-135",
            "model.name = smollm2-135: unknown model; did you mean smollm2-135m? give smollm2-135m, a Hub name like "
            "Qwen/Qwen2.5-7B-Instruct or a folder",
        ),
        (
            "model.name=runs/none",
            "model.name = runs/none: no such folder; give a run folder, a model folder, smollm2-135m or a Hub name",
        ),
        (
            "training.pack_tokens=64 agent",
            "training.pack_tokens = 64 agent: must be a valid integer, unable to parse string as an integer",
        ),
    ],
)
def test_an_override_that_is_wrong(small: Path, override: str, message: str) -> None:
    assert refused(small, override) == message


def numbers(kind: type[float], model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """The path of every key that is a number of this kind."""
    found = []
    for name, field in model.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        below = f"{prefix}{name}." + ("NAME." if get_origin(field.annotation) is dict else "")
        for section in parts:
            if isinstance(section, type) and issubclass(section, BaseModel):
                found += numbers(kind, section, below)
        if kind in parts:
            found.append(prefix + name)
    return found


@pytest.mark.parametrize("value", ["inf", "Infinity", "-inf", "nan", "'nan'", ".inf", ".nan", "1e400", "'1e400'"])
@pytest.mark.parametrize("key", numbers(float))
def test_no_number_is_infinite_or_none(small: Path, key: str, value: str) -> None:
    """`inf` is a text to YAML, which pydantic reads as a number."""
    key = key.replace("NAME", "some")
    others = ["engines.some={provider: openai, model: m}"] if key.startswith("engines") else []
    shown = show(_parse(value))
    if key == "training.betas":
        assert refused(small, f"{key}=[0.9, {value}]") == f"{key}.1 = {shown}: must be a finite number"
    else:
        assert refused(small, *others, f"{key}={value}") == f"{key} = {shown}: must be a finite number"


@pytest.mark.parametrize("value", ["1" + "0" * 30, "1" + "0" * 400])
@pytest.mark.parametrize("key", sorted({*numbers(int), *numbers(float)} - {"training.betas", "eval_tasks.seed"}))
def test_every_number_has_an_upper_bound(small: Path, key: str, value: str) -> None:
    key = key.replace("NAME", "some")
    others = ["engines.some={provider: openai, model: m}"] if key.startswith("engines") else []
    assert re.fullmatch(
        rf"{key} = 10*(\.\.\.)?: must be (less than( or equal to)? [\d.+e]+|a valid number)",
        refused(small, *others, f"{key}={value}"),
    )


@pytest.mark.parametrize("model", [*(builtin.options_model for builtin in BUILTIN.values()), McpServer])
def test_every_number_of_a_tool_has_an_upper_bound(model: type[ToolOptions]) -> None:
    for name in {*numbers(int, model), *numbers(float, model)}:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: 10**30})
        assert ((name,), "less_than_equal") in [(error["loc"], error["type"]) for error in caught.value.errors()]


def test_a_seed_is_one_that_numpy_and_the_store_take(small: Path) -> None:
    assert load_recipe(str(small), ["seed=9223372036854775807"]).seed == 2**63 - 1
    assert refused(small, "seed=-1") == "seed = -1: must be greater than or equal to 0"


def test_every_common_name_stands_for_a_key_and_is_none_itself() -> None:
    paths = set(key_paths(Recipe, ""))
    assert set(COMMON_NAMES.values()) <= paths
    assert set(COMMON_NAMES) & {path.rpartition(".")[2] for path in paths} == {"batch_size"}  # sft.batch_size


def test_spaces_around_the_equals_sign_are_named(small: Path) -> None:
    for words in (("training.steps", "=", "2"), ("training.steps", "=2"), ("training.steps=", "2")):
        assert "with no spaces around '='" in refused(small, *words)


def test_an_unknown_key_in_yaml_is_found_as_in_an_override(small: Path) -> None:
    small.write_text(MINIMAL + "training: {lora: {rank: 4}}\n")
    assert refused(small).startswith("training.lora.rank = 4: unknown key")
    small.write_text(MINIMAL + "training:\n  group_sise: 4\n")
    assert refused(small) == "training.group_sise = 4: unknown key; did you mean training.group_size?"


def test_a_missing_key_is_named(small: Path) -> None:
    small.write_text(MINIMAL.replace("  executor: {kind: direct}\n", ""))
    assert refused(small) == "agent.executor: missing; the recipe must set it"


def test_an_unknown_recipe_lists_what_exists(small: Path) -> None:
    message = refused("quickstrat")
    assert message.startswith(
        "recipe quickstrat: no such file or recipe; did you mean quickstart? recipes that exist: "
    )
    assert "four-llm" in message


def test_broken_yaml_names_the_line(small: Path) -> None:
    small.write_text("name: x\nagent: [1\n")
    assert refused(small).startswith(f"recipe {small}, line 3: not YAML: ")
    small.write_text("name: x\nseed: 1\nname: y\n")
    assert refused(small) == f"recipe {small}, line 3: key name is given twice (first on line 1)"
    small.write_text("- a\n")
    assert refused(small) == f"recipe {small}: must be key: value pairs, but holds list"


def test_an_alias_stands_for_a_plain_value(tmp_path: Path, small: Path) -> None:
    small.write_text(MINIMAL + "sft: {epochs: &often 3}\nevaluation: {trials: 1, concurrency: *often}\n")
    assert load_recipe(str(small)).evaluation.concurrency == 3
    lists = ", ".join(f"&b{level} [{', '.join([f'*b{level - 1}'] * 9)}]" for level in range(1, 9))
    bomb = MINIMAL + f"  tool_options: {{calculator: {{x: [&b0 [x], {lists}]}}}}\n"
    section = MINIMAL.replace("executor: {", "executor: &one {").replace("verifier: {kind: rule}", "verifier: *one")
    within = MINIMAL + "training: &t\n  sft: *t\n"
    for text, place in ((section, "line 4: *one"), (within, "line 8: *t"), (bomb, "line 7: *b0")):
        small.write_text(text)
        assert refused("small.yaml") == f"recipe small.yaml, {place} repeats a section or a list; write it out there"
    small.write_text(MINIMAL)
    assert "*a repeats a section or a list" in refused(small, "agent.tools=[&a [x], *a]")


def test_numbers_may_be_written_as_people_do(tmp_path: Path) -> None:
    file = tmp_path / "n.yaml"
    file.write_text("a: 1e-5\nb: 2E3\nc: .5e1\nd: 1e\n")
    assert read_yaml(file) == {"a": 1e-5, "b": 2000.0, "c": 5.0, "d": "1e"}


def test_a_run_as_model_is_its_newest_checkpoint_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/first"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: first\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("quickstart", ["model.name=runs/first"])
    assert str(caught.value) == (
        "model.name = runs/first: the run has no checkpoint yet; let it train, or name another model"
    )
    state = run / "checkpoints/step-00005/state.json"
    state.parent.mkdir(parents=True)
    (run / "checkpoints/step-00005/adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint is whole"):
        load_recipe("quickstart", ["model.name=runs/first"])
    state.write_text('{"step": 5, "quality": 0}')
    pinned = load_recipe("quickstart", ["model.name=runs/first"])
    assert pinned.model.name == str(state.parent)
    assert load_recipe("quickstart", [f"model.name={pinned.model.name}"]) == pinned
