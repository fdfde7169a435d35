import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from midflight.agent.types import (
    Action,
    Answer,
    Claim,
    ErrorKind,
    Generation,
    Query,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from midflight.engines.base import FinishReason, Sampling
from midflight.errors import CannotWrite
from midflight.store import NewTrajectory, PhaseLine, Store, StoreError, TrajectoryLine, ValueNotStorable
from midflight.store.codec import decode_id_sets, encode_ids
from midflight.tasks.base import Task
from tests.store.full import files_of_at_most

GRAMMAR = 'start: "capital: " /[A-Za-z ]+/ "\\n"'
TASK = Task("t1", "Capital of Ghana?", "Accra", checker_options={"fold_case": True}, kind="capital", level=2)

PLANNED = Generation(
    text="capital: Ghana\n",
    finish_reason=FinishReason.STOP,
    prompt_ids=tuple(range(49152, 48152, -1)),
    ids=(5, 0, 49151),
    logprobs=(-0.1 - 0.2, -5e-324, -math.inf),
    forced=(False, True, False),
    weights_version=7,
    sampling=Sampling(temperature=0.5, top_p=0.9, top_k=40, max_tokens=48, stop=("\n", "###"), seed=2**64 - 1),
    grammar=GRAMMAR,
)
EXECUTED = Generation(text='{"country": "Ghana"}', finish_reason=FinishReason.LENGTH, ids=(1,), logprobs=(-0.25,))

FULL = Trajectory(
    query=Query("Capital of Ghana?", "t1", 2**63 + 5),
    turns=(
        Turn(
            1,
            PLANNED,
            Action("find it", "capital", "Ghana"),
            ToolCall("capital", {"country": "Ghana", "limits": [1, 2.5, None, True]}),
            ToolResult("Accra \x00 <|im_end|> \ud800"),
            Verdict(False, "go on"),
            0.125,
            (("executor", EXECUTED), ("verifier", PLANNED)),
        ),
        Turn(
            2, replace(EXECUTED, text="?"), None, None, ToolResult("no", ErrorKind.INVALID_ACTION), Verdict(True), 0.1
        ),
    ),
    stop_reason=StopReason.VERIFIED,
    answer=Answer("Accra", (Claim("The capital is Accra", (1, 2)), Claim("unsupported", ()))),
    analysis="one look-up",
    seconds=1.75,
)
BROKEN = Trajectory(Query("q"), (), StopReason.INFRASTRUCTURE, None, error="engine down")


def new(step: int | None, phase: str = "train", trajectory: Trajectory = FULL, member: int = 0) -> NewTrajectory:
    return NewTrajectory(
        phase=phase,
        step=step,
        group="t1",
        member=member,
        task=TASK,
        trajectory=trajectory,
        reward=1.0,
        advantage=1.7320508075688772,
    )


def count(store_path: Path, table: str) -> int:
    with sqlite3.connect(store_path) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_a_trajectory_comes_back_equal_from_a_reopened_file(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        run_id = store.start_run("atlas", {"seed": 3, "model": {"name": "m"}}, 3)
        full = replace(new(4, member=6), reward=0.5, advantage=-0.5773502691896258)
        broken = replace(new(None, "before", BROKEN), reward=None, advantage=None)
        first, second = store.add_trajectories(run_id, [full, broken])
    with Store(tmp_path / "store.sqlite") as store:
        one, two = store.trajectories(run_id)
        (run,) = store.runs()
    assert (one.id, one.run_id, one.phase, one.step, one.group, one.member) == (first, run_id, "train", 4, "t1", 6)
    assert (one.reward, one.advantage) == (0.5, -0.5773502691896258)
    assert one.task == TASK
    assert one.trajectory == FULL
    assert (two.id, two.step, two.reward, two.advantage) == (second, None, None, None)
    assert two.trajectory == BROKEN
    assert (run.name, run.seed, run.recipe) == ("atlas", 3, {"seed": 3, "model": {"name": "m"}})


def test_an_action_with_empty_parts_is_not_taken_for_no_action(tmp_path: Path) -> None:
    turn = replace(FULL.turns[0], action=Action("", "finish", ""), call=ToolCall("finish", {}), other_generations=())
    with Store(tmp_path / "s") as store:
        run_id = store.start_run("r", {}, 0)
        store.add_trajectories(run_id, [new(1, trajectory=replace(FULL, turns=(turn,), answer=Answer("")))])
        (record,) = store.trajectories(run_id)
    assert record.trajectory.turns == (turn,)
    assert record.trajectory.answer == Answer("")


def test_filters_and_order(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        run_id, other = store.start_run("a", {}, 0), store.start_run("b", {}, 0)
        store.add_trajectories(run_id, [new(2, member=1), new(1, member=2), new(None, "before", member=3)])
        store.add_trajectories(other, [new(1, member=9)])
        assert [record.member for record in store.trajectories(run_id)] == [1, 2, 3]
        assert [record.member for record in store.trajectories(run_id, phase="train")] == [1, 2]
        assert [record.member for record in store.trajectories(run_id, phase="train", step=1)] == [2]
        assert [record.member for record in store.trajectories(run_id, phase="before")] == [3]
        assert store.trajectories(run_id, step=7) == []


def test_one_trajectory_by_id_and_those_of_one_group(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        run_id = store.start_run("a", {}, 0)
        ids = store.add_trajectories(run_id, [new(1), replace(new(1, trajectory=BROKEN), group="\ud800"), new(2)])
        second = store.trajectory(ids[1])
        assert second is not None and second.trajectory == BROKEN
        assert [store.trajectory(number) for number in (0, ids[-1] + 1)] == [None, None]
        assert [record.id for record in store.trajectories(run_id, "train", 1, "\ud800")] == ids[1:2]
        assert [record.id for record in store.trajectories(run_id, group="t1")] == [ids[0], ids[2]]


def test_the_last_trajectories_in_short_and_what_the_phases_hold(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        assert store.phases() == [] and store.last_trajectories(3) == []
        run_id = store.start_run("a", {}, 0)
        unscored = replace(new(2, trajectory=BROKEN), reward=None)
        store.add_trajectories(run_id, [new(None, "before"), new(1), unscored, new(None, "after"), new(None, "before")])
        assert store.phases() == [
            PhaseLine("before", 1, 5, None, None),
            PhaseLine("train", 2, 3, 1, 2),
            PhaseLine("after", 4, 4, None, None),
        ]
        assert store.last_trajectories(2) == [
            TrajectoryLine(4, "after", None, "t1", "Capital of Ghana?", 2, "verified", 1.0),
            TrajectoryLine(5, "before", None, "t1", "Capital of Ghana?", 2, "verified", 1.0),
        ]
        assert store.last_trajectories(9, "train", 2) == [
            TrajectoryLine(3, "train", 2, "t1", "q", 0, BROKEN.stop_reason, None)
        ]
        assert [line.id for line in store.last_trajectories(9, phase="train")] == [2, 3]
        assert [line.id for line in store.last_trajectories(9, step=1)] == [2]


def test_dropping_steps_removes_what_they_wrote_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        run_id, other = store.start_run("a", {}, 0), store.start_run("b", {}, 0)
        store.add_trajectories(run_id, [new(1), new(2), new(3), new(None, "before")])
        store.add_trajectories(other, [new(3)])
        store.finish_step(run_id, 1, {"reward": 0.5})
        store.finish_step(run_id, 2, {"reward": 0.6})
        assert store.steps(run_id) == {1: {"reward": 0.5}, 2: {"reward": 0.6}, 3: None}
        assert store.drop_steps_from(run_id, 2) == 2
        assert [(r.phase, r.step) for r in store.trajectories(run_id)] == [("train", 1), ("before", None)]
        assert store.steps(run_id) == {1: {"reward": 0.5}}
        assert len(store.trajectories(other)) == 1
        assert store.drop_phase(run_id, "before") == 1
    assert count(path, "trajectories") == 2
    assert count(path, "turns") == 4
    assert count(path, "other_generations") == 4


def test_a_bulk_write_is_all_or_nothing(tmp_path: Path) -> None:
    bad = replace(FULL, turns=(replace(FULL.turns[0], call=ToolCall("capital", {"x": object()})),))
    with Store(tmp_path / "s") as store:
        run_id = store.start_run("a", {}, 0)
        with pytest.raises(ValueNotStorable, match="arguments of capital"):
            store.add_trajectories(run_id, [new(1), new(1, trajectory=bad)])
        assert store.trajectories(run_id) == []
        assert store.steps(run_id) == {}


def test_a_trajectory_of_an_unknown_run_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store, pytest.raises(sqlite3.IntegrityError):
        store.add_trajectories(41, [new(None)])


def test_a_grammar_is_stored_once_and_prompts_are_small(tmp_path: Path) -> None:
    path = tmp_path / "s"
    long = replace(PLANNED, grammar="x" * 100_000)
    trajectory = replace(FULL, turns=(replace(FULL.turns[0], generation=long, other_generations=()),))
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        store.add_trajectories(run_id, [new(1, trajectory=trajectory, member=m) for m in range(20)])
        assert store.trajectories(run_id)[19].trajectory.turns[0].generation.grammar == "x" * 100_000
    assert count(path, "grammars") == 1
    assert path.stat().st_size < 400_000


def test_the_supports_of_truncated_draws_come_back_and_a_file_of_the_first_version_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        old = store.start_run("r", {}, 0)
        store.add_trajectories(old, [new(1)])
    with sqlite3.connect(path) as connection:  # as version 1 left it
        connection.execute("DROP TABLE supports")
        connection.execute("DROP TABLE whole_results")
        connection.execute("DROP TABLE judgements")
        connection.execute('UPDATE trajectories SET claims = \'[["The capital is Accra",[1,2]],["unsupported",[]]]\'')
        connection.execute("PRAGMA user_version = 1")
    cut = replace(FULL.turns[0].generation, supports=((3, 70_000), (), (5,)))
    judged = Verdict(True, "enough", valid=False, sufficient=True, contradictions=("turn 1 and 2 \ud800",))
    turn = replace(FULL.turns[0], generation=cut, verdict=judged)
    assert FULL.answer is not None
    sourced = replace(FULL.answer, claims=(Claim("c", (1,), ("https://x",)),))
    with Store(path) as store:
        store.add_trajectories(old, [new(2, trajectory=replace(FULL, turns=(turn,), answer=sourced))])
        first, second = store.trajectories(old)
        assert store.drop_steps_from(old, 2) == 1
    assert first.trajectory == FULL
    assert second.trajectory.turns == (turn,) and second.trajectory.answer == sourced
    assert count(path, "supports") == count(path, "judgements") == 0
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_the_whole_of_a_result_that_was_cut_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    cut = replace(FULL.turns[1], result=ToolResult("a [...] z", ErrorKind.TOOL_ERROR, "a\ud800 and all between z"))
    trajectory = replace(FULL, turns=(FULL.turns[0], cut))
    with Store(path) as store:
        run_id = store.start_run("r", {}, 0)
        store.add_trajectories(run_id, [new(1, trajectory=trajectory)])
        assert store.trajectories(run_id)[0].trajectory == trajectory
        assert count(path, "whole_results") == 1
        store.drop_steps_from(run_id, 1)
    assert count(path, "whole_results") == 0


def test_a_store_of_a_later_version_is_refused_in_one_line_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        Store(path)
    assert str(caught.value) == (
        f"{path}: written with store schema 99, this Midflight reads up to 3; "
        "upgrade midflight or use another run folder"
    )
    assert path.read_bytes() == before


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 30)
    with pytest.raises(StoreError, match="cannot be used as a store"):
        Store(tmp_path / "text")
    with pytest.raises(StoreError, match="cannot be used as a store"):
        Store(tmp_path)
    with sqlite3.connect(tmp_path / "other") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="not a Midflight store"):
        Store(tmp_path / "other")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE turns SET ids = x'00'", "error: Error -"),
        ("UPDATE turns SET logprobs = 'text'", "TypeError: "),
        ("UPDATE trajectories SET task = '{' WHERE id = 2", "JSONDecodeError: "),
        ("UPDATE trajectories SET task = '[]' WHERE id = 2", "ValueError: [] is no JSON object"),
        ("UPDATE trajectories SET task = '{\"name\":1}' WHERE id = 2", "TypeError: "),
        ("UPDATE turns SET arguments = '[1]' WHERE arguments IS NOT NULL", "ValueError: [1] is no JSON object"),
        ("UPDATE trajectories SET stop_reason = 'tired' WHERE id = 2", "ValueError: 'tired' is not a valid StopReason"),
        ("UPDATE trajectories SET reward = 'high' WHERE id = 2", "ValueError: reward is 'high', not a number"),
        ("UPDATE trajectories SET advantage = 9e999 WHERE id = 2", "ValueError: advantage is inf, not a number"),
        ("UPDATE turns SET weights_version = x'01'", "ValueError: weights_version is b'\\x01', not a number"),
        ("DELETE FROM turns WHERE position = 0", "ValueError: turn 1 is missing"),
        ("UPDATE turns SET turn = 3 WHERE position = 1", "ValueError: turn 2 is missing"),
        ("DELETE FROM grammars", "ValueError: grammar '"),
    ],
)
def test_a_damaged_trajectory_is_named_in_one_line(damage: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        store.add_trajectories(run_id, [new(1, trajectory=BROKEN), new(1)])
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    with Store(path) as store, pytest.raises(StoreError) as caught:
        store.trajectories(run_id)
    assert str(caught.value).startswith(f"{path}: trajectory 2 cannot be read ({said}")
    assert str(caught.value).endswith("); put back a copy of the file, or name another run")


def test_a_list_of_ids_that_runs_over_its_end_is_refused() -> None:
    for numbers in ((1, 5, 2, 5), (-1,), (0, -3)):
        with pytest.raises(ValueError, match="a list of .* ids where . follow"):
            decode_id_sets(encode_ids(numbers))


def test_whatever_is_read_of_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        store.add_trajectories(run_id, [new(1, member=member) for member in range(40)])
        store.finish_step(run_id, 1, {"reward": 0.5})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET recipe = '['")
        connection.execute("UPDATE steps SET metrics = '7'")
        connection.execute("UPDATE trajectories SET reward = 'high' WHERE id = 40")
    with Store(path) as store:
        for read, what in (
            (store.runs, "its runs"),
            (lambda: store.steps(run_id), "its steps"),
            (lambda: store.last_trajectories(3), "trajectory 40"),
        ):
            with pytest.raises(StoreError) as caught:
                read()
            assert str(caught.value).startswith(f"{path}: {what} cannot be read (")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : -4096] = b"\xaa" * (len(content) // 2 - 4096)
    path.write_bytes(content)
    with Store(path) as store:
        with pytest.raises(StoreError, match=r"its trajectories cannot be read \(DatabaseError: database disk image"):
            store.trajectories(run_id)
        with pytest.raises(StoreError, match=r"s: is damaged \(database disk image is malformed\); put back a copy"):
            store.drop_steps_from(run_id, 1)


def test_a_second_connection_reads_while_the_first_is_open(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as writer, Store(tmp_path / "s") as reader:
        run_id = writer.start_run("a", {}, 0)
        writer.add_trajectories(run_id, [new(1)])
        assert reader.trajectories(run_id)[0].trajectory == FULL


def test_a_full_disk_is_one_line_and_the_store_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        store.add_trajectories(run_id, [new(1)])
        full = path.with_name("s-wal").stat().st_size + 100
        with files_of_at_most(full):
            for write in (
                lambda: store.add_trajectories(run_id, [new(2), new(2)]),
                lambda: store.finish_step(run_id, 2, {"x": "y" * 9000}),
                lambda: store.start_run("b" * 9000, {}, 0),
                lambda: store.drop_steps_from(run_id, 1),
            ):
                with pytest.raises(CannotWrite) as raised:
                    write()
                assert str(raised.value).startswith(f"{path}: cannot be written (")
        assert store.steps(run_id) == {1: None}
        store.add_trajectories(run_id, [new(2)])
    with Store(path) as store:
        assert [(one.step, one.trajectory) for one in store.trajectories(run_id)] == [(1, FULL), (2, FULL)]
        assert len(store.runs()) == 1


def test_a_full_disk_is_noticed_when_the_log_is_written_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        store.add_trajectories(run_id, [new(step) for step in range(40)])
        with files_of_at_most(path.stat().st_size + 100), pytest.raises(CannotWrite):
            store.to_disk()
        store.to_disk()
        assert len(store.trajectories(run_id)) == 40


def test_a_store_that_cannot_be_made_for_want_of_room_says_so(tmp_path: Path) -> None:
    with files_of_at_most(100), pytest.raises(CannotWrite):
        Store(tmp_path / "s")


def test_the_log_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sizes = []
    with Store(path) as store:
        run_id = store.start_run("a", {}, 0)
        for step in range(30):
            store.add_trajectories(run_id, [new(step, member=member) for member in range(8)])
            store.to_disk()
            sizes.append(path.with_name("s-wal").stat().st_size)
    assert max(sizes[5:]) <= max(sizes[:5]) * 1.5
