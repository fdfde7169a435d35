import json
from dataclasses import replace
from pathlib import Path

from midflight.agent.types import Answer, Claim, ErrorKind, StopReason, Trajectory, Verdict
from midflight.evaluation import (
    Scored,
    comparison_table,
    pick_example,
    render_example,
    render_report,
    render_trajectory,
    summarise,
    write_report,
)
from midflight.evaluation.report import Closing, read_closing, read_report
from midflight.store import RunFolder
from tests.evaluation.build import scored, task, trajectory, turn

SUM = task("sum-1", "sum", 3, answer="42")


def test_a_trajectory_shows_each_turn_and_the_outcome() -> None:
    steps = trajectory(
        turn(1, "population", "Gana", "no such country", ErrorKind.TOOL_ERROR),
        turn(2, None, error=ErrorKind.INVALID_ACTION, result="write tool: context"),
        turn(3, "population", "Ghana", "33\n\x1b[31mmillion"),
        turn(4, "finish"),
        answer="33",
        question="How many?",
    )
    assert render_trajectory(steps, SUM, 0.0).splitlines() == [
        "  Question  How many?  (sum, level 3)",
        "  Turn 1    population: Gana",
        "    error   tool_error: no such country",
        "  Turn 2    no action in: None:",
        "    error   invalid_action: write tool: context",
        "  Turn 3    population: Ghana",
        "    result  33 ?[31mmillion",
        "  Turn 4    finish",
        "  Answer    33   [stopped: finished]",
        "  Expected  42",
        "  Verdict   wrong (reward 0)",
    ]


def test_a_free_question_shows_claims_and_no_expectation() -> None:
    steps = Trajectory(
        trajectory().query, (), StopReason.MAX_TURNS, Answer("x", (Claim("c", (1, 2)), Claim("d", ()))), "easy"
    )
    assert render_trajectory(steps).splitlines() == [
        "  Question  Question?",
        "  Analysis  easy",
        "  Answer    x   [stopped: max_turns]",
        "    claim   c  (supported by turn 1, turn 2)",
        "    claim   d  (unsupported)",
    ]
    lost = Trajectory(steps.query, (), StopReason.INFRASTRUCTURE, None, error="engine down")
    assert render_trajectory(lost, SUM, 0.0).splitlines()[1:] == [
        "  Answer    (none)   [stopped: infrastructure]",
        "  Error     engine down",
        "  Expected  42",
        "  Verdict   not answered: infrastructure failure, counted wrong",
    ]


def outcomes(**rewards: float) -> list[Scored]:
    levels = {"easy": 1, "middle": 2, "hard": 3, "harder": 4}
    return [scored(task(name, name, levels[name]), reward) for name, reward in rewards.items()]


def test_the_example_prefers_level_three_and_says_how_it_was_picked() -> None:
    before = outcomes(easy=0.0, middle=0.0, hard=0.0, harder=0.0)
    example = pick_example(before, outcomes(harder=1.0, easy=1.0, hard=1.0, middle=0.0))
    assert example.after is not None and example.after.task.id == "hard"
    assert example.note == (
        "Picked because it was wrong before and right after (3 such questions; the first of level 3)."
    )
    example = pick_example(before, outcomes(easy=1.0, middle=1.0, hard=0.0))
    assert example.after is not None and example.after.task.id == "middle"
    assert "none of them is of level 3; this one is of the highest level, 2" in example.note
    shown = render_example(example)
    assert shown.index("Before training") < shown.index("wrong (reward 0)") < shown.index("After training")


def test_no_example_is_said() -> None:
    example = pick_example(outcomes(easy=1.0, hard=0.5), outcomes(easy=1.0, hard=0.9))
    assert (example.before, example.after) == (None, None)
    assert render_example(example) == "No question was wrong before training and right after it, so none is shown."


def test_the_report_says_what_changed_and_what_was_lost(tmp_path: Path) -> None:
    before_items = [
        scored(task("a"), 1.0, turn(1, "capital"), turn(2, "finish")),
        scored(SUM, 0.0, turn(1, "capital", error=ErrorKind.TOOL_ERROR), turn(2, "finish")),
    ]
    after_items = [
        scored(task("a"), 0.0, stop=StopReason.INFRASTRUCTURE),
        scored(SUM, 1.0, turn(1, "population"), turn(2, "finish")),
    ]
    after_items[0] = replace(after_items[0], trajectory=replace(after_items[0].trajectory, error="s: down"))
    before, after = summarise(before_items), summarise(after_items)
    example = pick_example(before_items, after_items)
    text = render_report(before, after, example=example, closing=["Run folder: runs/x", "Next: midflight solve"])
    lines = text.splitlines()
    words = [" ".join(line.split()) for line in lines[: lines.index("One question, before and after")]]
    rows = ("capital ", "sum ", "all ", "tool_error ", "any error ", "population ", "finish ", "finished ", "infra")
    assert [line for line in words if line.startswith(rows)] == [
        "capital 1 1 100.0 [100.0, 100.0] 0.0 [0.0, 0.0]",
        "sum 3 1 0.0 [0.0, 0.0] 100.0 [100.0, 100.0]",
        "all 2 50.0 [0.0, 100.0] 50.0 [0.0, 100.0]",
        "finish 50.0 50.0 +0.0",
        "population 0.0 50.0 +50.0",
        "capital 50.0 0.0 -50.0",
        "tool_error 25.0 0.0 -25.0",
        "any error 25.0 0.0 -25.0",
        "finished 2 1",
        "infrastructure 0 1",
    ]
    note = lines.index("Note: 1 trajectories after training were lost to infrastructure failures; counted wrong above.")
    assert lines[note + 1 : note + 3] == ["  1  s: down", ""]
    assert lines[-2:] == ["Run folder: runs/x", "Next: midflight solve"]
    assert not any(line != line.rstrip() for line in lines)
    folder = RunFolder(tmp_path).create()
    write_report(folder, before, after, text)
    assert folder.report_text.read_text() == text
    assert json.loads(folder.report_json.read_text()) == {"before": before.to_json(), "after": after.to_json()}


def test_the_last_lines_name_the_place_where_the_run_is(tmp_path: Path) -> None:
    result = summarise([scored(SUM, 1.0, turn(1, "finish"))])
    made = Closing("r", 7, 12.4, 0.0, ["reward.png", "turns.png"], "Is r here?", [])
    folder = RunFolder(tmp_path / "moved").create()
    text = render_report(result, result, closing=made.lines(RunFolder(Path("r"))))
    write_report(folder, result, result, text, made)
    assert folder.report_text.read_text() == text
    assert read_closing(folder) == made
    head, _, _ = text.rpartition("\n\n")
    assert read_report(folder) == (
        f"{head}\n\n"
        "took 12 s\n"
        f"run folder: {folder.path}\n"
        f"plots: {folder.plots} (reward.png, turns.png)\n"
        f'try next: midflight solve "Is r here?" --model {folder.path}\n'
    )
    write_report(folder, result, result, text)
    assert read_closing(folder) is None and read_report(folder) == text


def test_the_last_lines_of_a_program_with_tools_of_its_own_in_two_sessions() -> None:
    made = Closing("r", 7, 12.4, 3.6, [], 'A "nut"?', ["stock", "price"])
    lines = made.lines(RunFolder(Path("r")))
    assert lines[0] == "took 12 s, 4 s of it in steps of earlier sessions"
    assert lines[-1] == "try next: midflight.solve('A \"nut\"?', 'r', tools=[stock, price])"


def test_the_comparison_has_one_row_a_result() -> None:
    result = summarise([scored(SUM, 1.0, turn(1, "finish"))])
    assert comparison_table({"frozen": result, "trained": summarise([scored(task("a"), 0.0)])}).splitlines() == [
        "         n            accuracy %            level 3+ %  turns  tool errors %  infrastructure",
        "-------  -  --------------------  --------------------  -----  -------------  --------------",
        "frozen   1  100.0 [100.0, 100.0]  100.0 [100.0, 100.0]   1.00            0.0               0",
        "trained  1        0.0 [0.0, 0.0]                     -   0.00            0.0               0",
    ]
    nothing = summarise([scored(SUM, 0.0, stop=StopReason.INFRASTRUCTURE)])
    assert comparison_table({"m": nothing}).splitlines()[2].split() == ["m", "1", "-", "-", "0.00", "0.0", "1"]


def test_a_verdict_with_a_reason_is_shown() -> None:
    stopped = replace(turn(1, "finish"), verdict=Verdict(True, "enough"))
    assert "    verdict stop: enough" in render_trajectory(trajectory(stopped)).splitlines()
