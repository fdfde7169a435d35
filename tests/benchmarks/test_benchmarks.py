"""The benchmarks on constructed run folders: no model is loaded."""

import json
import resource
import sys

import ablation
import common
import four_llm
import pytest
import quickstart
from folders import answered, finished_run, question

from midflight.agent.types import ErrorKind, StopReason
from midflight.agent.verifier import UNREADABLE
from midflight.evaluation import Scored

from folders import trajectory, turn  # isort: skip

EASY = [question(f"e{number}") for number in range(3)]
HARD = question("h", "density", 3)


def rewards(*values):
    return [answered(task, value) for task, value in zip([*EASY, HARD], values, strict=True)]


def test_quickstart_prints_the_figures_of_each_seed_and_what_they_meet(tmp_path, capsys):
    finished_run(tmp_path / "quickstart-seed0", rewards(1, 0, 0, 0), rewards(1, 1, 1, 1))
    finished_run(
        tmp_path / "quickstart-seed1", rewards(1, 1, 0, 0), rewards(1, 1, 1, 0), overrides=("seed=1",),
        drifts=(2e-4,), spent=(700.0, 6.5),
    )  # fmt: skip
    assert quickstart.main(["--seeds", "0", "1", "--run-dir", str(tmp_path), "--reuse", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["seeds"]
    assert (first["seed"], first["before"], first["after"], first["after_three_or_more_calls"]) == (0, 0.25, 1.0, 1.0)
    assert first["after_interval"] == [1.0, 1.0] and first["before_interval"][0] <= 0.25 <= first["before_interval"][1]
    assert (first["seconds"], first["peak_gb"], first["questions"]) == (120.0, 2.5, 4)
    assert (first["max_drift"], first["steps"]) == (3e-6, 2)
    assert second["after_three_or_more_calls"] == 0.0
    met = {name: list(target["met"].values()) for name, target in found["targets"].items()}
    assert met == {
        "seconds": [True, False],
        "peak_gb": [True, False],
        "before": [True, False],
        "after": [True, False],
        "after_three_or_more_calls": [True, False],
        "questions": [False, False],
        "max_drift": [True, False],
    }
    assert quickstart.main(["--seeds", "0", "--run-dir", str(tmp_path), "--reuse"]) == 0
    assert "questions at least 200: missed by seed 0" in capsys.readouterr().out


def test_a_run_of_another_recipe_is_an_error_and_not_a_figure(tmp_path, capsys):
    finished_run(tmp_path / "quickstart-seed0", rewards(1, 0, 0, 0), rewards(1, 1, 1, 1))
    assert quickstart.main(["--seeds", "0", "--run-dir", str(tmp_path), "--reuse", "--json", "training.steps=3"]) == 1
    (entry,) = (found := json.loads(capsys.readouterr().out))["seeds"]
    assert "another training.steps" in entry["error"] and "before" not in entry
    assert found["targets"]["after"]["met"] == {"0": False}


def test_without_reuse_a_folder_that_exists_is_refused_by_the_run_itself(tmp_path, capsys):
    folder = finished_run(tmp_path / "quickstart-seed0", rewards(1, 0, 0, 0), rewards(1, 1, 1, 1))
    assert quickstart.main(["--seeds", "0", "--run-dir", str(tmp_path), "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["seeds"]
    assert entry["error"].startswith("exit code 2: midflight: --run-dir") and str(folder) in entry["error"]


def test_a_bad_override_is_an_error_of_its_seed(tmp_path, capsys):
    assert quickstart.main(["--seeds", "0", "--run-dir", str(tmp_path), "--json", "training.stepz=3"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["seeds"]
    assert "training.stepz" in entry["error"]


def test_time_and_memory_are_those_of_the_whole_process(tmp_path, monkeypatch):
    code = (
        "import sys, time; block = bytearray(300_000_000); block[::4096] = b'x' * len(block[::4096]); time.sleep(0.3)"
    )
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(common.sys, "executable", str(wrapper))
    finished_run(tmp_path / "x-seed0", rewards(1, 0, 0, 0), rewards(1, 1, 1, 1), spent=None)
    found = common.run("quickstart", 0, (), tmp_path, reuse=False, label="x")
    assert found.error is None
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux gives a child its parent's to begin
    assert 0.3 <= found.seconds < 20 and 0.3 <= found.peak_gb < max(0.6, own + 0.1)
    again = common.run("quickstart", 0, (), tmp_path, reuse=True, label="x")
    assert (again.seconds, again.peak_gb) == (found.seconds, found.peak_gb)


def test_overrides_are_found_after_the_seeds():
    options = common.parse(common.arguments("", "quickstart", (0,)), ["--seeds", "1", "2", "a.b=3", "--json"])
    assert (options.seeds, options.overrides, options.as_json) == ([1, 2], ["a.b=3"], True)


def test_ablation_pairs_the_arms_by_question_and_seed(tmp_path, capsys):
    outcomes = {0: ((1, 1, 1, 1), (1, 1, 0, 0)), 1: ((1, 1, 0, 1), (1, 0, 0, 0))}
    for seed, (ours, theirs) in outcomes.items():
        finished_run(tmp_path / f"quickstart-seed{seed}", rewards(0, 0, 1, 0), rewards(*ours),
                     overrides=(f"seed={seed}",))  # fmt: skip
        finished_run(tmp_path / f"quickstart-turn_normalised-seed{seed}", rewards(0, 0, 1, 0), rewards(*theirs),
                     overrides=(f"seed={seed}", "training.advantage=turn_normalised"))  # fmt: skip
    assert ablation.main(["--seeds", "0", "1", "--run-dir", str(tmp_path), "--reuse", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    accuracy = {name: arm["accuracy"] for name, arm in found["arms"].items()}
    assert accuracy == {"frozen": 0.25, "turn_normalised": 3 / 8, "flow_grpo": 7 / 8}
    assert [one["accuracy"] for one in found["arms"]["flow_grpo"]["seeds"]] == [1.0, 0.75]
    assert found["arms"]["flow_grpo"]["by_level"]["3"]["accuracy"] == 1.0
    difference = found["difference"]
    assert difference["accuracy"] == 0.5 and difference["n"] == 8 and difference["seeds"] == [0, 1]
    assert difference["by_level"]["3"] == {"accuracy": 1.0, "interval": [1.0, 1.0], "n": 2}
    low, high = difference["interval"]
    assert 0 <= low <= 0.5 <= high <= 1
    assert ablation.main(["--seeds", "0", "1", "--run-dir", str(tmp_path), "--reuse"]) == 0
    assert "flow_grpo - turn_normalised" in capsys.readouterr().out


def test_ablation_has_an_arm_of_supervised_training_taught_by_flow_grpo(tmp_path, capsys, monkeypatch):
    finished_run(tmp_path / "quickstart-seed0", rewards(0, 0, 1, 0), rewards(1, 1, 1, 1))
    finished_run(tmp_path / "quickstart-turn_normalised-seed0", rewards(0, 0, 1, 0), rewards(1, 1, 1, 1),
                 overrides=("training.advantage=turn_normalised",))  # fmt: skip
    arguments, folder = tmp_path / "arguments", tmp_path / "quickstart-sft-seed0"
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho "$@" > {arguments}\nmkdir {folder}\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(common.sys, "executable", str(wrapper))
    given = ["--seeds", "0", "--arms", "turn_normalised", "sft", "--run-dir", str(tmp_path), "--reuse"]
    assert ablation.main([*given, "training.steps=3"]) == 1  # the other runs were made with other steps
    assert "sft, seed 0 failed: its teacher failed: " in capsys.readouterr().out
    assert not arguments.exists()
    assert ablation.main([*given, "sft.epochs=3"]) == 1  # which is for this arm alone; the wrapper makes no run
    assert f"sft, seed 0 failed: {folder} has no report.json" in capsys.readouterr().out
    assert arguments.read_text().split() == [
        "-m", "midflight", "sft", "quickstart", "seed=0", "sft.epochs=3", "--run-dir", str(folder), "--from",
        str(tmp_path / "quickstart-seed0"),
    ]  # fmt: skip
    finished_run(folder, rewards(0, 0, 1, 0), rewards(1, 1, 0, 0))
    assert ablation.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["arms"]) == ["frozen", "turn_normalised", "sft", "flow_grpo"]
    assert found["arms"]["sft"]["accuracy"] == 0.5
    assert (found["difference"]["accuracy"], found["sft_difference"]["accuracy"]) == (0.0, 0.5)
    assert ablation.main(given) == 0
    assert "flow_grpo - sft" in capsys.readouterr().out


def test_ablation_with_a_failed_arm_has_no_difference(tmp_path, capsys):
    finished_run(tmp_path / "quickstart-seed0", rewards(0, 0, 1, 0), rewards(1, 1, 1, 1))
    finished_run(tmp_path / "quickstart-turn_normalised-seed0", rewards(0, 0, 1, 0), rewards(1, 1, 1, 1))
    assert ablation.main(["--seeds", "0", "--run-dir", str(tmp_path), "--reuse", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"] is None
    assert "another training.advantage" in found["arms"]["turn_normalised"]["seeds"][0]["error"]


def test_different_questions_cannot_be_paired():
    with pytest.raises(ValueError, match="different questions"):
        ablation.paired_difference([(rewards(1, 1, 1, 1), rewards(1, 1, 1, 1)[:3])])


def test_four_llm_counts_errors_by_module_and_causes(tmp_path, capsys):
    before = [
        Scored(
            EASY[0],
            trajectory(
                turn(1, None, "bad", ErrorKind.INVALID_ACTION),
                turn(2, "capital", "bad", ErrorKind.INVALID_ARGUMENTS, reason=UNREADABLE),
                turn(3, "capital", EASY[0].answer),
                turn(4, "finish"),
                answer="",
            ),
            0.0,
        ),
        Scored(EASY[1], trajectory(turn(1, "area", "1", stop=True), answer="1", stop=StopReason.VERIFIED), 0.0),
    ]
    after = [answered(EASY[0], 1.0), answered(EASY[1], 1.0)]
    finished_run(tmp_path / "four-llm-seed0", before, after, recipe="four-llm")
    assert four_llm.main(["--run-dir", str(tmp_path), "--reuse", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["seeds"]
    assert entry["before"]["error_rates"] == {
        "planner": 1 / 5,
        "executor": 1 / 3,
        "tool": 0.0,
        "verifier": 1 / 3,
        "generator": 1 / 2,
    }
    assert entry["before"]["causes"] == {"generator_wrong": 1, "planner_wrong_tool": 1}
    assert entry["before"]["stop_reasons"] == {"verified": 1, "finished": 1}
    assert entry["after"]["accuracy"] == 1.0 and entry["after"]["causes"] == {}
    assert entry["after"]["by_kind"]["capital"]["n"] == 2
    assert four_llm.main(["--run-dir", str(tmp_path), "--reuse"]) == 0
    assert "cause of wrong answers" in capsys.readouterr().out
