"""Rules between the keys of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midflight.recipe import Recipe, RecipeError, load_recipe, resolved
from midflight.recipe.config import TrainingConfig
from midflight.recipe.rules import check
from midflight.recipe.validating import validate
from tests.recipe.test_config import refused

TASK = {"question": "a", "answer": "b", "checker": "exact"}


def test_nearest_examples_need_examples_that_can_be_told_apart(small: Path, tmp_path: Path) -> None:
    one, key = "agent.planner.nearest_examples=1", "agent.planner.nearest_examples = 1"
    assert refused(small, one) == (
        f"{key}: there are no examples to choose from; set agent.planner.examples or remove it"
    )
    file = tmp_path / "shots.txt"
    file.write_text("Question: a\n\nTurn 1: finish\n")
    given = f"agent.planner.examples={file}"
    assert load_recipe(str(small), [given, one]).agent.planner.nearest_examples == 1
    assert refused(small, given, "agent.planner.nearest_examples=2") == (
        f"agent.planner.nearest_examples = 2: {file} has 1; set 1 or less, or null to show all"
    )
    file.write_text("Turn 1: finish\n\nQuestion: a\n")
    assert refused(small, given, one) == (
        f'{key}: {file} does not start with "Question:"; begin each example with such a line'
    )


def test_grounded_needs_the_grammar_and_an_executor_that_adds_nothing() -> None:
    assert refused("quickstart", "agent.planner.grammar=false") == (
        "agent.grounded = true: is held by the grammar; set agent.planner.grammar=true"
    )
    assert refused("quickstart", "agent.executor.kind=llm") == (
        "agent.grounded = true: an argument is a quote or a result, which an LLM executor has nothing to add to; "
        "set agent.executor.kind=direct or agent.grounded=false"
    )


def test_a_task_file_is_read_before_any_work(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    key, give = f"train_tasks.family = {file}", "; give a JSONL file of {id, question, answer, checker}"
    good = {"id": "1", "question": "a", "answer": "b", "checker": "exact", "kind": "x"}
    assert refused(small, "train_tasks.family=q.jsonl") == f"{key}: cannot read: No such file or directory{give}"
    file.write_text(json.dumps(good) + "\n\n{\n")
    assert refused(small, "train_tasks.family=q.jsonl").startswith(f"{key}:3: not JSON: ")
    file.write_text(json.dumps({**good, "answer": 3}) + "\n")
    assert refused(small, "train_tasks.family=q.jsonl").startswith(f"{key}:1: key 'answer': ")
    file.write_text("\n")
    assert refused(small, "train_tasks.family=q.jsonl") == f"{key}: holds no task{give}"
    file.write_text(json.dumps(good) + "\n")
    assert load_recipe(str(small), ["train_tasks.family=q.jsonl"]).train_tasks.family == str(file)
    assert refused(small, "train_tasks.family=q.jsonl", "train_tasks.split=test") == (
        "train_tasks.split = test: does nothing for a task file, which is one fixed list; "
        "remove it or set train_tasks.split=train"
    )
    held_out = ["eval_tasks.family=q.jsonl", "eval_tasks.count=null"]
    assert load_recipe(str(small), [*held_out, "eval_tasks.split=test"]).eval_tasks.family == str(file)
    assert refused(small, *held_out, "eval_tasks.seed=3") == (
        "eval_tasks.seed = 3: does nothing for a task file, which is one fixed list; remove it or set eval_tasks.seed=0"
    )
    assert refused(small, "train_tasks.seed=3").startswith("train_tasks.seed = 3: unknown key; ")
    assert refused(small, "train_tasks.family=q.jsonl", "train_tasks.kinds=[y]") == (
        f"train_tasks.kinds = y: no line of {file} has it; kinds there: x"
    )
    assert refused(small, "train_tasks.family=q.jsonl", "training.curriculum={}") == (
        f'training.curriculum: has one kind to choose from (x); give the "kind" of the lines of {file} '
        "two or more values or set training.curriculum=null"
    )


def test_an_unknown_tool_lists_the_valid_ones(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.recipe.rules.builtin_tools", lambda: ["calculator", "capital"])
    assert refused(small, "agent.tools=[calculater]") == (
        "agent.tools = [calculater]: unknown tool calculater; did you mean calculator? "
        "tools that exist: calculator, capital"
    )


def test_a_long_list_of_tools_is_cut(small: Path) -> None:
    names = ", ".join(["calculator"] * 10_000)
    assert refused(small, f"agent.tools=[{names}]") == (
        f"agent.tools = {f'[{names}]'[:77]}...: calculator is listed twice; remove one"
    )


def test_tools_given_as_objects_are_known(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.recipe.rules.builtin_tools", lambda: ["calculator"])
    data = resolved(load_recipe(str(small)))
    data["agent"]["tools"] = ["mine"]
    recipe: Recipe = validate(data)
    check(recipe, own_tools=["mine"])
    with pytest.raises(RecipeError, match="unknown tool mine"):
        check(recipe)


def test_bounds_of_the_update(small: Path) -> None:
    assert refused(small, "training.betas=[0.9, 1.0]") == (
        "training.betas = [0.9, 1.0]: each must be at least 0 and below 1"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.gigpo.discount=0.9"],
            "training.gigpo: does nothing with training.advantage = flow_grpo; remove it or set "
            "training.advantage=gigpo",
        ),
        (
            ["training.overlong_penalty=2", "training.overlong=mask"],
            "training.overlong_penalty = 2.0: does nothing with training.overlong = mask; remove it or set "
            "training.overlong=penalise",
        ),
        (
            ["training.kl_in=reward", "training.kl_beta=0"],
            "training.kl_in = reward: does nothing with training.kl_beta = 0.0; remove it or set "
            "training.kl_beta=0.001",
        ),
        (
            ["training.kl_in=reward", "training.advantage=gigpo"],
            "training.kl_in = reward: training.advantage = gigpo would scale the KL of turns that else ended alike to "
            "full strength; set training.kl_in=loss or another training.advantage",
        ),
        (
            ["training.importance_cap=2"],
            "training.importance_cap = 2: with training.max_drift = 0.0001 the run stops before any weight differs "
            "from 1; set training.max_drift to the log-prob gap that is to be corrected, as 0.5, or leave "
            "importance_cap out",
        ),
        (
            ["training.loss=reinforce", "training.clip_epsilon=0.1"],
            "training.clip_epsilon = 0.1: does nothing with training.loss = reinforce; remove it or set "
            "training.loss=ppo_clip",
        ),
        *(
            (
                [f"training.{key}={value}", *more],
                f"training.{key} = {value}: does nothing in the first optimizer step on a batch, where ratios are 1, "
                "and training.epochs = training.mini_batches = 1; remove it or set training.epochs=2",
            )
            for key, value in (("clip_epsilon", 0.1), ("clip_epsilon_high", 0.28), ("dual_clip", 3.0))
            for more in ([], ["training.importance_cap=2", "training.max_drift=0.5"])
        ),
        (
            ["training.loss=cispo", "training.dual_clip=3"],
            "training.dual_clip = 3.0: does nothing with training.loss = cispo; remove it or set "
            "training.loss=ppo_clip",
        ),
        (
            ["training.loss=reinforce", "training.epochs=2"],
            "training.epochs = 2: training.loss = reinforce is for data of the weights that train, and has no ratio "
            "for later steps; set training.loss=ppo_clip or training.epochs=1",
        ),
        (
            ["training.mini_batches=65"],
            "training.mini_batches = 65: a step may have no more than queries_per_step x group_size = 64 trajectories; "
            "set training.mini_batches=64 or less",
        ),
    ],
)
def test_what_an_objective_would_not_use_is_refused(small: Path, overrides: list[str], message: str) -> None:
    assert refused(small, *overrides) == message


def test_every_advantage_loss_and_weighting_loads(small: Path) -> None:
    for override in (
        *(f"training.advantage={name}" for name in ("flow_grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo")),
        *(f"training.loss={name}" for name in ("ppo_clip", "gspo", "cispo", "reinforce")),
        *(f"training.weighting={name}" for name in ("trajectory", "turn", "token")),
        "training.clip_epsilon_high=0.28 training.epochs=2",
        "training.clip_epsilon_high=0.28 training.mini_batches=2",
        "training.clip_epsilon_high=0.28 training.max_drift=0.5",
        "agent.planner.top_p=0.9",
    ):
        load_recipe(str(small), override.split())


def test_a_model_folder_must_hold_one(small: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(small, "model.name=./empty") == (
        "model.name = ./empty: the folder is neither a model, an adapter nor a run; "
        "it holds none of config.json, adapter_config.json, recipe.yaml"
    )
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert load_recipe(str(small), ["model.name=./empty"]).model.name == "./empty"


def test_the_file_that_is_trained_on_is_not_what_it_is_measured_on(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({**TASK, "id": kind, "kind": kind}) + "\n" for kind in ("x", "y")))
    (tmp_path / "same.jsonl").symlink_to(file)
    given = ["train_tasks.family=q.jsonl", "eval_tasks.count=null"]
    for held_out in ("q.jsonl", "same.jsonl"):
        assert refused(small, *given, f"eval_tasks.family={held_out}") == (
            f"eval_tasks.family = {tmp_path / held_out}: also the file that is trained on; give questions that are not "
            "in it, or set eval_tasks=null"
        )
    recipe = load_recipe(str(small), [*given, "eval_tasks.family=q.jsonl"], training=False)
    assert recipe.eval_tasks is not None and recipe.eval_tasks.family == str(file)


def test_overrides_are_a_list(small: Path) -> None:
    with pytest.raises(RecipeError, match=r"^overrides: must be a list, not a text; write \['seed=value'\]$"):
        load_recipe(str(small), "seed=3")


def test_an_unknown_kind_of_a_family(small: Path) -> None:
    assert refused(small, "train_tasks.kinds=[capitol]").startswith(
        "train_tasks.kinds = capitol: unknown kind of atlas; did you mean capital? kinds: capital, population, area, "
    )


@pytest.mark.parametrize("name", ["train_tasks", "eval_tasks"])
def test_no_kinds_are_no_questions(small: Path, tmp_path: Path, name: str) -> None:
    line = f"{name}.kinds = []: leaves no question; name a kind, or set {name}.kinds=null for all"
    (tmp_path / "t.jsonl").write_text('{"id": "1", "question": "?", "answer": "x", "checker": "exact"}\n')
    for family in ("atlas", "t.jsonl"):
        assert refused(small, f"{name}.family={family}", f"{name}.kinds=[]", "eval_tasks.count=5") == line


def test_analyst_settings_without_query_analysis_are_refused() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("quickstart", ["agent.analyst.max_tokens=8"])
    assert str(error.value) == (
        "agent.analyst: does nothing with agent.query_analysis = false; remove it or set agent.query_analysis=true"
    )
    assert load_recipe("quickstart", ["agent.query_analysis=true", "agent.analyst.max_tokens=8"]).agent.query_analysis


def test_a_refill_that_adds_no_query_is_refused(small: Path) -> None:
    assert refused(small, "training.queries_per_step=8", "training.refill_factor=1.1") == (
        "training.refill_factor = 1.1: less than one query more than training.queries_per_step = 8; "
        "set training.refill_factor=1.13 or 1"
    )
    allowed = load_recipe(str(small), ["training.queries_per_step=8", "training.refill_factor=1.13"])
    assert allowed.training.most_queries == 9


def test_a_rate_that_would_fall_after_the_last_step_is_refused(small: Path) -> None:
    last = "does nothing, as the rate is reached in the last step (training.steps = 20); remove it"
    held = ["training.steps=20", "training.warmup_steps=19"]
    assert refused(small, *held, "training.final_rate=0.5") == (
        f"training.final_rate = 0.5: {last} or lower training.warmup_steps"
    )
    one = ["training.steps=1", "training.warmup_steps=0", "training.final_rate=0"]
    assert refused(small, *one) == f"training.final_rate = 0: {last.replace('20', '1')}"
    assert load_recipe(str(small), ["training.steps=20", "training.warmup_steps=18", "training.final_rate=0.5"])


@pytest.mark.parametrize(("queries", "factor", "most"), [(25, 1.16, 29), (45, 1.4, 63), (50, 1.14, 57), (3, 1.5, 4)])
def test_a_refill_factor_is_the_decimal_number_that_is_written(queries: int, factor: float, most: int) -> None:
    assert TrainingConfig(queries_per_step=queries, refill_factor=factor).most_queries == most


def test_examples_that_are_not_text_are_refused(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "examples.txt"
    file.write_bytes(b"Question: \xff\n")
    said = refused(small, f"agent.planner.examples={file}")
    assert said.startswith(f"agent.planner.examples = {file}: cannot be read ('utf-8' codec")
    assert said.endswith("; give a text file in UTF-8")


@pytest.mark.parametrize("name", ["../x", "", " ", "..", "a\x1bb"])
def test_a_name_that_makes_no_folder_is_refused(small: Path, name: str) -> None:
    assert refused(small, f"name={json.dumps(name)}") == (
        f"name = {name!r}: run folders are called after it; give a word without slashes"
    )
