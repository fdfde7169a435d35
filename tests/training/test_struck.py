"""The kill matrix: wherever a run is killed, interrupted or out of room, a resume gives the undisturbed numbers.

On a model of a few random weights, as processes of the command line; see `struck`.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midflight.store import RunFolder, Store, read_metrics
from tests.training.struck import SECONDS_IN_A_FORWARD, Ended, Strike, midflight
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Ghana": "Accra", "Nepal": "Kathmandu"}
RECIPE = """
name: tiny
model: {name: %s, chat_template: false, context_length: 1024, max_batch: 8, lora: {rank: 4, alpha: 8}}
agent:
  planner: {format: compact, max_tokens: 24}
  executor: {kind: direct}
  verifier: {kind: rule}
  generator: {kind: last_result}
  grounded: true
  max_turns: 2
  memory_tokens: 48
  tools: [capital, population]
train_tasks: {family: train.jsonl}
eval_tasks: {family: held_out.jsonl}
training:
  steps: 3
  queries_per_step: 3
  group_size: 8
  learning_rate: 1e-2
  kl_beta: 0.01
  refill_factor: 1.5
  curriculum: {}
  save_every: 1
  keep_last: 1
  keep_best: 0
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    lines = [
        json.dumps({"id": name, "question": name, "answer": city, "checker": "exact", "kind": name})
        for name, city in CAPITALS.items()
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (folder / "held_out.jsonl").write_text(lines[4] + "\n")
    (folder / "tiny.yaml").write_text(RECIPE % make_byte_model(folder / "model"))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> RunFolder:
    run = RunFolder(recipe.parent / "undisturbed")
    ended = train(recipe, run)
    assert ended.code == 0, ended.lines
    assert all(record["trained_tokens"] for record in read_metrics(run.metrics)), "each step has to move the weights"
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def train(recipe: Path, run: RunFolder, *options: str, strike: Strike | None = None) -> Ended:
    return midflight(["train", str(recipe), "--run-dir", str(run.path), *options], recipe.parent / "log", strike)


def numbers(run: RunFolder) -> list[dict[str, Any]]:
    """The metrics that do not depend on time."""
    return [
        {key: value for key, value in record.items() if not key.startswith("seconds") and "per_second" not in key}
        for record in read_metrics(run.metrics)
    ]


def drawn(run: RunFolder) -> list[Any]:
    with Store(run.store) as store:
        assert len(store.runs()) == 1
        records = store.trajectories(1)
    return [
        (one.phase, one.step, one.task, one.member, one.reward, one.advantage, turn.generation, turn.result)
        for one in records
        for turn in one.trajectory.turns
    ]


def saved(run: RunFolder) -> dict[str, bytes]:
    """Every file of the last checkpoint."""
    return {file.name: file.read_bytes() for file in (run.checkpoints / "step-00003").iterdir()}


def checkpoints(run: RunFolder) -> list[str]:
    return sorted(folder.name for folder in run.checkpoints.iterdir())


def resumes_to_the_same(recipe: Path, run: RunFolder, undisturbed: RunFolder, after: int) -> Ended:
    """Resume after step `after` in a fresh process; all that was logged, drawn and saved equals the undisturbed run."""
    ended = train(recipe, run, "--resume")
    assert ended.code == 0, ended.lines
    assert f"resuming {run.path} after step {after}" in ended.lines
    assert numbers(run) == numbers(undisturbed)
    assert drawn(run) == drawn(undisturbed)
    assert saved(run) == saved(undisturbed)
    return ended


@pytest.mark.parametrize(
    ("strike", "left", "logged"),
    [
        (Strike("rollouts", "SIGKILL", call=4), ["step-00001"], 1),
        (Strike("reward", "SIGKILL", call=5), ["step-00001"], 1),
        (Strike("backward", "SIGKILL", call=2), ["step-00001"], 1),
        (Strike("saving", "SIGKILL", steps=2), [".writing-00002", "step-00001"], 2),
        (Strike("renamed", "SIGKILL", steps=2), ["step-00001", "step-00002"], 2),
        (Strike("removing", "SIGKILL", steps=2), [".removing-step-00001", "step-00002"], 2),
    ],
    ids=lambda value: value.place if isinstance(value, Strike) else "",
)
def test_a_killed_run_resumes_to_the_same_numbers(
    recipe: Path, run: RunFolder, undisturbed: RunFolder, strike: Strike, left: list[str], logged: int
) -> None:
    assert train(recipe, run, strike=strike).code == -signal.SIGKILL
    assert checkpoints(run) == left
    assert len(read_metrics(run.metrics)) == logged
    newest = int(left[-1].removeprefix("step-"))
    ended = resumes_to_the_same(recipe, run, undisturbed, after=newest)
    half = f"{run.checkpoints / '.writing-00002'} was not written to its end, not used"
    assert (half in ended.lines) == (".writing-00002" in left)
    assert checkpoints(run) == ["step-00003"]


def test_what_a_run_lost_is_made_again_from_its_store_and_said(
    recipe: Path, run: RunFolder, undisturbed: RunFolder
) -> None:
    assert train(recipe, run, strike=Strike("rollouts", "SIGKILL", steps=2)).code == -signal.SIGKILL
    first, second = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text(second[: len(second) // 2])
    before = run.eval_before.read_bytes()
    run.eval_before.unlink()
    ended = resumes_to_the_same(recipe, run, undisturbed, after=2)
    assert f"{run.metrics} lacked 2 steps (1 to 2) of 2 that are done: written again from the store" in ended.lines
    assert f"{run.eval_before} is missing: made again from the store" in ended.lines
    assert run.metrics.read_text().startswith(first + second) and run.eval_before.read_bytes() == before
    for lost in (run.report_text, run.eval_after):
        lost.unlink()
        assert train(recipe, run, "--resume").code == 0 and lost.is_file()


def test_what_a_run_lost_with_its_store_is_said(recipe: Path, run: RunFolder) -> None:
    assert train(recipe, run, strike=Strike("rollouts", "SIGKILL", steps=2)).code == -signal.SIGKILL
    for file in (*run.path.glob("store.sqlite*"), run.metrics, run.eval_before):
        file.unlink()
    ended = train(recipe, run, "--resume")
    assert ended.code == 2
    for said in (
        f"{run.store} holds no run: what the 2 steps that are done drew is lost",
        f"{run.metrics} lacks 2 steps (1 to 2) of 2 that are done, and so does the store: plots have a gap",
        f"{run.eval_before} is missing, and the store has nothing to make it of: there will be no report",
    ):
        assert said in ended.lines
    assert [record["step"] for record in read_metrics(run.metrics)] == [3]


def test_killed_before_its_first_checkpoint_it_starts_again(
    recipe: Path, run: RunFolder, undisturbed: RunFolder
) -> None:
    strike = Strike("saving", "SIGKILL", steps=1)
    assert train(recipe, run, strike=strike).code == -signal.SIGKILL
    assert checkpoints(run) == [".writing-00001"]
    ended = train(recipe, run, "--resume")
    assert f"{run.path} has no checkpoint yet: starting at step 1" in ended.lines
    assert (numbers(run), drawn(run), saved(run)) == (numbers(undisturbed), drawn(undisturbed), saved(undisturbed))


@pytest.mark.parametrize(
    ("strike", "phase"),
    [
        (Strike("rollouts", "SIGINT", call=4), "interrupted"),
        (Strike("rollouts", "SIGTERM", call=4), "interrupted"),
        (Strike("rollouts", "SIGTERM unseen", call=4), "interrupted"),
        (Strike("backward", "SIGTERM", call=2), "train"),
        (Strike("backward", "SIGHUP", call=2), "train"),
    ],
    ids=lambda value: f"{value.how}-{value.place}" if isinstance(value, Strike) else "",
)
def test_a_signal_keeps_what_is_done_and_says_how_to_go_on(
    recipe: Path, run: RunFolder, undisturbed: RunFolder, strike: Strike, phase: str
) -> None:
    ended = train(recipe, run, strike=strike)
    sent = strike.how.split()[0]
    assert ended.code == 128 + signal.Signals[sent], ended.lines
    assert ended.seconds < SECONDS_IN_A_FORWARD / 2
    name = "" if sent == "SIGINT" else f" by {sent}"
    assert ended.lines[-2].startswith("step 1/3 ")
    assert ended.lines[-1] == (
        f"midflight: interrupted{name}; the checkpoint step-00001 is kept, go on with: "
        f"midflight train {recipe} --run-dir {run.path} --resume"
    )
    with Store(run.store) as store:
        kept = store.trajectories(1, step=2)
        assert store.steps(1)[2] is None
    assert {one.phase for one in kept} == {phase}
    assert all(one.reward is not None and one.trajectory.turns for one in kept)
    assert (0 < len(kept) < 24) if phase == "interrupted" else len(kept) >= 24
    assert checkpoints(run) == ["step-00001"]
    resumes_to_the_same(recipe, run, undisturbed, after=1)


@pytest.mark.parametrize(("how", "code"), [("SIGTERM twice", -signal.SIGTERM), ("SIGINT twice", 130)])
def test_a_second_signal_ends_at_once(recipe: Path, run: RunFolder, how: str, code: int) -> None:
    ended = train(recipe, run, strike=Strike("rollouts", how, call=4))
    assert ended.code == code, ended.lines
    assert ended.seconds < SECONDS_IN_A_FORWARD / 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("place", "steps", "what", "after"),
    [
        ("saving", 2, "/checkpoints/step-00002", 1),
        ("storing", 1, "/store.sqlite", 1),
        ("evaluated", 3, "", 3),
    ],
)
def test_a_full_disk_ends_the_run_in_one_line_and_with_room_it_goes_on(
    recipe: Path, small_disk: Path, undisturbed: RunFolder, place: str, steps: int, what: str, after: int
) -> None:
    run = RunFolder(small_disk / "run")
    ended = train(recipe, run, strike=Strike(place, "full", steps=steps, disk=small_disk))
    assert ended.code == 1, ended.lines
    assert ended.lines[-1].startswith(f"midflight: {run.path}{what}: cannot be written (")
    assert ended.lines[-1].endswith(
        " MB free there); what was saved before is kept: make room, then go on with --resume"
    )
    assert not any("Traceback" in line for line in ended.lines)
    assert checkpoints(run) == [f"step-{after:05d}"]
    (small_disk / "ballast").unlink()
    resumes_to_the_same(recipe, run, undisturbed, after)


def test_a_file_that_may_not_grow_ends_the_run_in_one_line(
    recipe: Path, run: RunFolder, undisturbed: RunFolder
) -> None:
    ended = train(recipe, run, strike=Strike("saving", "limit", steps=2))
    assert ended.code == 1, ended.lines
    assert ended.lines[-1].startswith(f"midflight: {run.checkpoints / 'step-00002'}: cannot be written (")
    assert checkpoints(run) == ["step-00001"]
    resumes_to_the_same(recipe, run, undisturbed, after=1)


def test_the_newest_whole_checkpoint_is_taken_by_resume_and_by_eval(
    recipe: Path, run: RunFolder, undisturbed: RunFolder
) -> None:
    keep = recipe.parent / "keep.yaml"
    keep.write_text(recipe.read_text().replace("keep_last: 1", "keep_last: 3"))
    assert train(keep, run).code == 0
    last = run.checkpoints / "step-00003"
    weights = last / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    skipped = f"{last} is not whole, not used: adapter_model.safetensors is not what was written (another SHA-256)"

    asked = midflight(["eval", str(keep), "--model", str(run.path)], recipe.parent / "log")
    assert (asked.code, asked.lines[:2]) == (0, [f"loading {run.path}", skipped])
    assert weights.read_bytes() == content
    ended = resumes_to_the_same(keep, run, undisturbed, after=2)
    assert ended.lines[1:3] == [skipped, f"resuming {run.path} after step 2"]

    for folder in run.checkpoints.iterdir():
        with (folder / "optimizer.pt").open("r+b") as file:
            file.truncate(100)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    refused = train(keep, run, "--resume")
    assert refused.code == 2
    assert [line for line in refused.lines if "optimizer.pt has 100 bytes, " in line] == refused.lines[1:4]
    assert refused.lines[4:] == [
        f"midflight: {run.checkpoints}: no checkpoint is whole (step-00001, step-00002, step-00003); put back a copy "
        "of one, or remove them to begin at step 1"
    ]
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
