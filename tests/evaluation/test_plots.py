import math
from pathlib import Path

from matplotlib.figure import Figure

from midflight.evaluation import summarise, write_plots
from midflight.evaluation.plots import draw_accuracy, draw_errors, draw_loss, draw_reward, draw_tools
from midflight.store import MetricsWriter, RunFolder
from tests.evaluation.build import scored, task, turn

RECORDS = [
    {
        "step": 1,
        "reward": 0.25,
        "success_by_level": {"1": 0.5, "2": 0.0},
        "tool_shares": {"capital": 0.75, "finish": 0.25},
        "turns": 3.0,
        "errors": {"tool_error": 0.1, "tool_timeout": 0.0},
        "tool_error_rate": 0.1,
    },
    {
        "step": 2,
        "reward": 0.5,
        "success_by_level": {"1": 1.0},
        "tool_shares": {"finish": 1.0},
        "turns": 2.5,
        "errors": {"tool_error": 0.0},
        "tool_error_rate": 0.0,
    },
]


def lines(draw: object) -> dict[str, list[float]]:
    axes = Figure().add_subplot()
    draw(axes, RECORDS)  # type: ignore[operator]
    return {str(line.get_label()): [float(value) for value in line.get_ydata()] for line in axes.get_lines()}


def test_lines_hold_what_was_recorded_in_the_units_of_the_axis() -> None:
    assert lines(draw_tools) == {"finish": [25.0, 100.0], "capital": [75.0, 0.0]}
    assert lines(draw_errors) == {"tool error": [10.0, 0.0], "any error": [10.0, 0.0]}
    reward = lines(draw_reward)
    assert reward["all (mean reward)"] == [0.25, 0.5]
    assert reward["level 1"] == [0.5, 1.0]
    assert reward["level 2"][0] == 0.0 and reward["level 2"][1] != reward["level 2"][1]


def test_a_step_without_a_reward_is_a_gap() -> None:
    axes = Figure().add_subplot()
    draw_reward(axes, [{"step": 1, "reward": None, "success_by_level": {}}, *RECORDS])
    (line,) = axes.get_lines()[-1:]
    assert line.get_label() == "all (mean reward)" and math.isnan(line.get_ydata()[0])
    assert list(line.get_ydata()[1:]) == [0.25, 0.5]


def test_bars_stand_for_each_kind_and_for_all() -> None:
    items = [scored(task("a"), 1.0), scored(task("b"), 0.0), scored(task("c", "sum", 3), 1.0)]
    axes = Figure().add_subplot()
    draw_accuracy(axes, {"before": summarise(items[:2]), "after": summarise(items)})
    assert [round(bar.get_height(), 1) for bar in axes.patches] == [50.0, 50.0, 50.0, 100.0, 66.7]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["capital\nlevel 1\nn=2", "sum\nlevel 3\nn=1", "all\nn=3"]


def test_a_run_folder_gets_the_plots_its_files_allow(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    assert write_plots(tmp_path) == []
    summarise([scored(task("a"), 1.0, turn(1, "finish"))]).save(folder.eval_before)
    assert write_plots(tmp_path) == [folder.plots / "accuracy.png"]
    with MetricsWriter(folder.metrics) as writer:
        writer.write(RECORDS[0])
        writer.write({"step": 2, "reward": None})
    names = [path.name for path in write_plots(folder)]
    assert names == ["reward.png", "tools.png", "turns.png", "errors.png", "accuracy.png"]
    assert all((folder.plots / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_a_run_on_demonstrations_has_its_loss_drawn_and_no_rollouts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    records = [{"step": step, "demonstrations": 16, "loss": loss} for step, loss in ((1, 0.5), (2, 0.25))]
    with MetricsWriter(folder.metrics) as writer:
        for record in records:
            writer.write(record)
    assert write_plots(folder) == [folder.plots / "loss.png"]
    axes = Figure().add_subplot()
    draw_loss(axes, records)
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[0.5, 0.25]]
