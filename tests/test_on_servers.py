"""An agent whose every module is on a server: it starts without torch, and its key is nowhere to be found."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from midflight.agent.types import Query, StopReason
from midflight.building import build_agent
from midflight.errors import UserError
from midflight.recipe import load_recipe
from midflight.server.wire import Answer, Request
from midflight.store import NewTrajectory, Store
from midflight.tasks.base import Task
from tests.engines.serving import chat, error, ok, served

KEY = "sk-very-secret-0123456789"
RECIPE = """\
name: served
engines:
  strong:
    {{provider: openai, model: m, base_url: "{url}", key_variable: STRONG_KEY, retries: 2, prompt_price: 2.0}}
agent:
  planner: {{engine: strong, max_tokens: 200}}
  executor: {{kind: direct}}
  verifier: {{kind: rule}}
  generator: {{kind: llm, engine: strong, max_tokens: 200}}
  max_turns: 2
  tools: [calculator]
eval_tasks: {{family: "{tasks}", count: null}}
"""


def answer(request: Request) -> Answer:
    """A server that shows the key in whatever it says."""
    user = json.loads(request.body)["messages"][-1]["content"]
    echo = request.headers["authorization"]
    if "Write the answer." in user:
        return ok(chat(f"Answer: It is 42 {echo}. [turn 1]\n", usage=(50, 9)))
    if "Turn 1." in user:
        return ok(chat("Sub-goal: multiply\nTool: calculator\nContext: 6 * 7", usage=(40, 12)))
    return ok(chat(f"Sub-goal: {echo}\nTool: finish", usage=(60, 8)))


def written(folder: Path, url: str) -> Path:
    tasks = folder / "tasks.jsonl"
    question = {"id": "q", "question": "What is 6 times 7?", "answer": "42", "checker": "numeric"}
    tasks.write_text(json.dumps(question) + "\n")
    file = folder / "served.yaml"
    file.write_text(RECIPE.format(url=url, tasks=tasks))
    return file


async def command(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
    """`midflight` in a process of its own, which says at its end whether torch was imported."""
    program = (
        "import sys; from midflight.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers'} & set(sys.modules); print(heavy or 'light', file=sys.stderr); sys.exit(code)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "STRONG_KEY": key},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.asyncio
async def test_solve_and_eval_run_without_torch_and_say_what_was_used(tmp_path: Path) -> None:
    async with served(answer) as server:
        recipe = str(written(tmp_path, server.base_url))
        code, out, err = await command("solve", "What is 6 times 7?", "--recipe", recipe)
        assert (code, err.splitlines()[-1]) == (0, "light"), err
        assert "calculator: 6 * 7" in out and "It is 42 Bearer [key]." in out
        assert "planner on strong: 2 requests, 100 prompt + 20 completion tokens, cost 0.0002" in err
        assert "generator on strong: 1 requests, 50 prompt + 9 completion tokens, cost 0.0001" in err
        kept = tmp_path / "kept.jsonl"
        code, evaluated, said = await command("eval", recipe, "--json", "--trajectories", str(kept))
        assert (code, said.splitlines()[-1]) == (0, "light"), said
        (line,) = map(json.loads, kept.read_text().splitlines())
        assert (line["task"]["id"], line["reward"], line["trajectory"]["stop_reason"]) == ("q", 1.0, "finished")
        turn = line["trajectory"]["turns"][0]
        assert (turn["call"]["arguments"], turn["result"]["text"]) == ({"expression": "6 * 7"}, "42")
        assert turn["generation"]["text"].startswith("Sub-goal: multiply") and KEY not in kept.read_text()
        code, _, refusal = await command("eval", recipe, "--trajectories", str(kept))
        assert code == 2 and f"--trajectories {kept}: exists; name a new file" in refusal
        result = json.loads(evaluated)
        assert result["n"] == 1 and result["usage"]["total"]["requests"] == 3
        prompts = b"".join(request.body for request in server.requests)
        assert "warning:" not in err
        assert all(KEY not in text for text in (out, err, evaluated, said)) and KEY.encode() not in prompts
        assert b"[key]" in prompts  # what the planner drew came back in the generator's memory


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["1", "test", "EMPTY", "sk-1234", "not-needed"])
async def test_a_placeholder_is_sent_and_changes_no_text_and_one_line_says_so(tmp_path: Path, key: str) -> None:
    async with served(answer) as server:
        recipe = str(written(tmp_path, server.base_url))
        code, out, err = await command("solve", f"Is {key} a latest Empty?", "--recipe", recipe, key=key)
        assert code == 0 and f"It is 42 Bearer {key}." in out and "[key]" not in out + err
        assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {key}"}
    said = [line for line in err.splitlines() if line.startswith("warning:")]
    assert said == [
        "warning: key_variable = STRONG_KEY: its value is too short, or too usual, for a key: it is sent, but not "
        "taken out of what comes back"
    ]


@pytest.mark.asyncio
async def test_a_tool_that_says_the_key_brings_it_into_no_prompt_and_no_output(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(
        "import os\nfrom midflight.tools import tool\n\n@tool\ndef leak(text: str) -> str:\n"
        '    """Fail with what must not be said."""\n    raise ValueError("key is " + os.environ["STRONG_KEY"])\n'
    )

    def asks_leak(request: Request) -> Answer:
        return Answer(200, answer(request).body.replace(b"calculator", b"leak"))

    async with served(asks_leak) as server:
        recipe = str(written(tmp_path, server.base_url))
        leak = f"agent.tools=['{tmp_path}/leak.py:leak']"
        code, out, err = await command("solve", "What is 6 times 7?", leak, "--recipe", recipe)
        prompts = b"".join(request.body for request in server.requests)
    assert code == 0 and "ValueError: key is [key]" in out and KEY not in out + err
    assert b"ValueError: key is [key]" in prompts and KEY.encode() not in prompts


@pytest.mark.asyncio
async def test_solve_says_what_a_generator_wrote_that_is_no_answer(tmp_path: Path) -> None:
    def off(request: Request) -> Answer:
        return Answer(200, answer(request).body.replace(b"Answer: It is 42", b"I think it is 42"))

    async with served(off) as server:
        recipe = str(written(tmp_path, server.base_url))
        code, _, err = await command("solve", "What is 6 times 7?", "--recipe", recipe)
    assert code == 1 and (
        "midflight: no answer: finished: the generator's text holds no answer in its format: "
        "'I think it is 42 Bearer [key]. [turn 1]'" in err.splitlines()
    )


@pytest.mark.asyncio
async def test_a_shipped_recipe_runs_on_a_server_by_the_documented_command(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    block = page.partition("## Recipes on a server")[2].partition("```sh\n")[2].partition("```")[0]
    program, *arguments = shlex.split(block.replace("\\\n", ""))
    claim = "Grebe Island counted 1,611 puffins in 2024."
    asked: list[str] = []
    script = {
        "You plan how": f"Sub-goal: check\nTool: verify_claim\nContext: {claim}",
        "You write the arguments": json.dumps({"claim": claim, "source": claim}),
        "You check a claim": "supported 1",
        "You check the work": "Result: valid\nMemory: sufficient\nContradictions: none\nReason: known",
        "You write the final answer": "Answer: 1611 [turn 1]",
    }

    def said(request: Request) -> Answer:
        (module,) = (start for start in script if start in json.loads(request.body)["messages"][0]["content"])
        asked.append(module)
        return ok(chat(script[module]))

    async with served(said) as server:
        here = [text.replace("http://127.0.0.1:8000/v1", server.base_url) for text in arguments]
        code, out, err = await command(*here)
        models = {body["model"] for body in server.bodies}
    assert (program, code, err.splitlines()[-1]) == ("midflight", 0, "light"), err
    assert f"  result  supported {claim}\n" in out and out.endswith("\n1611\n  claim   1611  (supported by turn 1)\n")
    assert asked == list(script) and models == {"Qwen/Qwen3-32B"}
    assert "tools on strong: 1 requests, 7 prompt + 3 completion tokens" in err
    assert "model.context_length: does nothing, as every module names an engine; left out" in err


@pytest.mark.asyncio
async def test_eval_says_how_many_questions_a_spent_budget_left_out(tmp_path: Path) -> None:
    async with served(answer) as server:
        recipe = str(written(tmp_path, server.base_url))
        code, out, err = await command("eval", recipe, "budget.tokens=60", "--json")
        one = (tmp_path / "tasks.jsonl").read_text()
        (tmp_path / "tasks.jsonl").write_text(one + one.replace('"q"', '"r"'))
        part = await command("eval", recipe, "budget.tokens=150", "evaluation.concurrency=1", "--json")
    assert code == 1 and json.loads(out)["stop_reasons"] == {"budget": 1} and json.loads(out)["accuracy"] is None
    assert (
        "midflight: nothing was measured: 1 of 1 trajectories were ended by budget.tokens = 60: spent, with 120 tokens"
        "; set it higher" in err.splitlines()
    )
    said = "budget spent: 1 trajectories ended without an answer, counted wrong"
    assert said not in err and f"{said}: budget.tokens = 150: spent, with 179 tokens; set it higher" in part[2]
    assert (part[0], json.loads(part[1])["stop_reasons"]) == (0, {"finished": 1, "budget": 1})
    assert json.loads(part[1])["accuracy"]["mean"] == 0.5


@pytest.mark.asyncio
@pytest.mark.parametrize("as_json", [False, True])
async def test_eval_of_which_nothing_is_left_says_why_and_is_no_result(tmp_path: Path, as_json: bool) -> None:
    async with served(error(401, f"bad {KEY}")) as server:
        recipe = str(written(tmp_path, server.base_url))
        two = (tmp_path / "tasks.jsonl").read_text()
        (tmp_path / "tasks.jsonl").write_text(two + two.replace('"q"', '"r"'))
        code, out, err = await command("eval", recipe, *(["--json"] if as_json else []))
    reason = f"planner failed: {server.base_url}: HTTP 401: bad [key]; check key_variable and what its key may do"
    assert code == 1 and KEY not in out + err
    assert (
        f"midflight: nothing was measured: 2 of 2 trajectories were lost to infrastructure failures: {reason}"
        in err.splitlines()
    )
    if as_json:
        found = json.loads(out)
        assert (found["accuracy"], found["three_or_more"], found["by_kind"], found["by_level"]) == (None, None, {}, {})
        assert (found["n"], found["infrastructure"], found["infrastructure_reasons"]) == (2, 2, {reason: 2})
    else:
        assert out.splitlines()[-1].split() == ["strong", "2", "-", "-", "0.00", "0.0", "2"]


@pytest.mark.asyncio
async def test_eval_of_which_a_part_is_left_says_why_and_is_a_result(tmp_path: Path) -> None:
    def some(request: Request) -> Answer:
        return error(400, "no seven") if b"7 times 7" in request.body else answer(request)

    async with served(some) as server:
        recipe = str(written(tmp_path, server.base_url))
        two = (tmp_path / "tasks.jsonl").read_text()
        (tmp_path / "tasks.jsonl").write_text(two + two.replace('"q"', '"r"').replace("6 times", "7 times"))
        code, out, err = await command("eval", recipe)
    assert code == 0 and out.splitlines()[-1].split()[:3] == ["strong", "2", "50.0"]
    assert (
        "1 of 2 trajectories were lost to infrastructure failures: planner failed: "
        f"{server.base_url}: HTTP 400: no seven" in err
    )


@pytest.mark.asyncio
async def test_an_error_says_what_to_do_and_not_the_key(tmp_path: Path) -> None:
    async with served(error(401, f"bad {KEY}")) as server:
        recipe = str(written(tmp_path, server.base_url))
        code, out, err = await command("solve", "x", "--recipe", recipe)
        assert code == 1 and KEY not in out + err
        assert "infrastructure: planner failed:" in err and "HTTP 401: bad [key]; check key_variable" in err
        assert len(server.requests) == 1
    code, _, err = await command("eval", "quickstart")
    assert (code, "--model: missing, as agent.planner.engine = null" in err) == (2, True)
    code, _, err = await command("eval", recipe, "--model", "smollm2-135m")
    assert (code, "--model smollm2-135m: does nothing, as every module names an engine" in err) == (2, True)


@pytest.mark.asyncio
async def test_neither_store_nor_trajectory_nor_cache_nor_log_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRONG_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.DEBUG)
    async with served(error(500, f"bad {KEY}"), answer) as server:
        recipe = load_recipe(str(written(tmp_path, server.base_url)), ["engines.strong.cache=true"], training=False)
        built = build_agent(recipe)
        made = await built.flow.run(Query("What is 6 times 7?", seed=1))
        built.close()
    assert built.ledger.total.retries == 1 and len(server.requests) == 4
    assert made.stop_reason is StopReason.FINISHED and made.answer is not None
    assert KEY not in repr(made) + repr(built) and "[key]" in made.answer.text
    with Store(tmp_path / "store.sqlite") as store:
        run = store.start_run("r", {}, 0)
        task = Task("q", "What is 6 times 7?", "42", "numeric")
        store.add_trajectories(
            run, [NewTrajectory(phase="x", step=None, group="g", member=0, task=task, trajectory=made, reward=1.0)]
        )
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 4 and not any(KEY.encode() in file.read_bytes() for file in files)
    assert b"Bearer [key]" in (tmp_path / "cache" / "midflight" / "responses.sqlite").read_bytes()
    assert KEY not in repr([vars(record) for record in caplog.records])


@pytest.mark.asyncio
async def test_a_spent_budget_ends_trajectories_without_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONG_KEY", KEY)
    async with served(answer) as server:
        recipe = load_recipe(str(written(tmp_path, server.base_url)), ["budget.tokens=150"], training=False)
        built = build_agent(recipe)
        first, second = [await built.flow.run(Query("What is 6 times 7?", seed=seed)) for seed in (1, 2)]
        built.close()
    assert (first.stop_reason, len(first.turns)) == (StopReason.FINISHED, 2)
    assert (second.stop_reason, second.turns, second.answer) == (StopReason.BUDGET, (), None)
    assert second.error == "budget.tokens = 150: spent, with 179 tokens" and second.stop_reason.lost
    assert built.ledger.total.requests == 3


def test_a_missing_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRONG_KEY", raising=False)
    recipe: Any = load_recipe(str(written(tmp_path, "http://127.0.0.1:1/v1")), training=False)
    with pytest.raises(UserError) as caught:
        build_agent(recipe)
    assert str(caught.value) == (
        "engines.strong.key_variable = STRONG_KEY: not set in the environment; export STRONG_KEY=..."
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("Bearer sk-0123456789", "a space, which no key has; set it to the key alone, without Bearer"),
        ("sk-01234 56789", "a space, which no key has; set it to the key alone"),
        ("sk-01234é56789", "a line break or a sign that is not of ASCII, which no key has; set it to the key alone"),
    ],
)
def test_a_key_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, said: str) -> None:
    monkeypatch.setenv("STRONG_KEY", key)
    recipe: Any = load_recipe(str(written(tmp_path, "http://127.0.0.1:1/v1")), training=False)
    with pytest.raises(UserError) as caught:
        build_agent(recipe)
    assert str(caught.value) == f"engines.strong.key_variable = STRONG_KEY: its value has {said}"
