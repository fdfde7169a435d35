"""Task files: whole, or one error with the file and the line."""

import json
from pathlib import Path

import pytest

from midflight.tasks import Task, TaskFileError, atlas_tasks, load_tasks
from midflight.tasks.jsonl import to_jsonl

GOOD = {"id": "1", "question": "Capital of Peru?", "answer": "Lima", "checker": "exact"}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_load(tmp_path: Path) -> None:
    number = {
        "id": "2",
        "question": "1 + 1?\u2028",
        "answer": "2",
        "checker": "numeric",
        "checker_options": {"absolute_tolerance": 0.1},
        "kind": "sum",
        "level": 3,
    }
    text = json.dumps(number, ensure_ascii=False)
    assert load_tasks(write(tmp_path, GOOD, "", text)) == [
        Task("1", "Capital of Peru?", "Lima"),
        Task("2", "1 + 1?\u2028", "2", "numeric", {"absolute_tolerance": 0.1}, "sum", 3),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_question(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert load_tasks(path) == [Task("1", "Capital of Peru?", "Lima")]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tasks = [
        Task("1", "Capital\nof Per\u00fa?\u2028", "Lima", "exact", {"aliases": ["Ciudad de los Reyes"]}, "capital", 2),
        Task("2", "1 + 1?", "2", "numeric", {"relative_tolerance": 0.1}),
    ]
    file = tmp_path / "q.jsonl"
    file.write_text(to_jsonl(tasks))
    assert load_tasks(file) == tasks
    file.write_text(to_jsonl([Task("1", "Capital of Peru?", "Lima", checker_options={"aliases": ("a", "b")})]))
    assert load_tasks(file)[0].checker_options == {"aliases": ["a", "b"]}


def test_atlas_survives_a_round_trip(tmp_path: Path) -> None:
    tasks = atlas_tasks("test", 240, seed=3)
    assert load_tasks(write(tmp_path, *(vars(task) for task in tasks))) == tasks


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ({key: value for key, value in GOOD.items() if key != "answer"}, "key 'answer' is missing"),
        (GOOD | {"anwser": "x"}, "unknown key 'anwser'"),
        (GOOD | {"checker": "fuzzy"}, "unknown checker 'fuzzy'; valid: exact, numeric"),
        (GOOD | {"checker_options": {"alias": []}}, "no option 'alias'"),
        (GOOD | {"answer": 5}, "key 'answer'"),
        (GOOD | {"answer": ""}, "key 'answer' is blank"),
        (GOOD | {"answer": " "}, "key 'answer' is blank"),
        (GOOD | {"id": " "}, "key 'id' is blank"),
        (GOOD | {"level": 0}, "key 'level'"),
        (GOOD | {"checker": "numeric"}, "'Lima' is not a number"),
        (GOOD | {"checker_options": {"aliases": 5}}, "checker 'exact'"),
        (GOOD, "id '1' was used on line 1"),
    ],
)
def test_bad_lines(tmp_path: Path, row: object, reason: str) -> None:
    path = write(tmp_path, GOOD, "", row)
    with pytest.raises(TaskFileError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert reason in message
    assert "\n" not in message


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot read: No such file"):
        load_tasks(tmp_path / "absent.jsonl")
    with pytest.raises(TaskFileError, match="cannot read"):
        load_tasks(tmp_path)
    with pytest.raises(TaskFileError, match="holds no task"):
        load_tasks(write(tmp_path, "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'\n{"id": "\xe9"}')
    with pytest.raises(TaskFileError, match=r"latin\.jsonl:2: not UTF-8"):
        load_tasks(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("checker", "options", "said"),
    [
        ("exact", {"aliases": "abc"}, "aliases"),
        ("exact", {"aliases": [1]}, "aliases"),
        ("numeric", {"relative_tolerance": -1}, "relative_tolerance must be a finite number of at least 0"),
        ("numeric", {"relative_tolerance": 10**400}, "relative_tolerance must be a finite number of at least 0"),
        ("numeric", {"absolute_tolerance": "1"}, "absolute_tolerance"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(
    tmp_path: Path, checker: str, options: dict[str, object], said: str
) -> None:
    file = tmp_path / "q.jsonl"
    row = {"id": "1", "question": "a", "answer": "5", "checker": checker, "checker_options": options}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskFileError, match=f":1: checker '{checker}': {said}"):
        load_tasks(file)


def test_a_blank_question_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "1", "question": " ", "answer": "5", "checker": "exact"}) + "\n")
    with pytest.raises(TaskFileError, match=":1: key 'question' is blank"):
        load_tasks(file)
