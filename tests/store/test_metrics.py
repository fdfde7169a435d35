import json
from pathlib import Path

import pytest

from midflight.errors import CannotWrite
from midflight.store import MetricsError, MetricsWriter, read_metrics
from tests.store.full import files_of_at_most


def test_records_come_back_and_are_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "reward": 0.1 + 0.2, "errors": {"tool_error": 0.05}})
        assert read_metrics(path) == [{"step": 1, "reward": 0.30000000000000004, "errors": {"tool_error": 0.05}}]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write({"step": 1, "loss": float("nan"), "inner": {"kl": [float("inf"), 1.0]}})
    assert json.loads((tmp_path / "m").read_text()) == {"step": 1, "loss": None, "inner": {"kl": [None, 1.0]}}


def test_a_half_written_last_line_is_left_out_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}')
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2"):
        read_metrics(tmp_path / "m")


def test_a_resume_keeps_the_steps_that_are_done_and_appends_go_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    said: list[str] = []
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3, 4):
            writer.write({"step": step})
        assert writer.go_on(2, {1: {"step": 1, "stored": True}, 3: {"step": 3}}, said.append) == [
            {"step": 1},
            {"step": 2},
        ]
        writer.write({"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [file.name for file in tmp_path.iterdir()] == ["m"] and said == []


def test_what_the_file_lost_is_written_again_and_what_nobody_has_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 3}\n{"step": "4"}\n{"step": 5}\n{"step": 6, "rew')
    said: list[str] = []
    stored = {1: {"step": 1, "loss": float("nan")}, 2: None, 4: {"step": 4}, 8: {"step": 8}}
    with MetricsWriter(path) as writer:
        with pytest.raises(MetricsError, match="m, line 2: not the record of a step; repair or remove the line"):
            writer.go_on(5, stored, said.append)
        path.write_text('{"step": 3}\n{"step": 5}\n')
        writer.go_on(5, stored, said.append)
    assert read_metrics(path) == [{"step": 1, "loss": None}, {"step": 3}, {"step": 4}, {"step": 5}]
    assert said == [
        f"{path} lacked 2 steps (1 to 4) of 5 that are done: written again from the store",
        f"{path} lacks step 2 of 5 that are done, and so does the store: plots have a gap",
    ]


def test_an_absent_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []


def test_a_full_disk_leaves_the_lines_before_and_the_next_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
        with files_of_at_most(20), pytest.raises(CannotWrite) as raised:
            writer.write({"step": 2, "text": "x" * 100})
    assert str(raised.value).startswith(f"{path}: cannot be written (File too large; ")
    assert str(raised.value).endswith(
        " MB free there); what was saved before is kept: make room, then go on with --resume"
    )
    assert path.read_text() == '{"step": 1}\n{"step":'
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_an_interrupted_resume_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step})
        with files_of_at_most(5), pytest.raises(OSError, match="File too large"):
            writer.go_on(2, {}, print)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
