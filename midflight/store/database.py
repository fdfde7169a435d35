"""Runs, steps, trajectories and turns in one SQLite file.

Invariant: a trajectory read back equals the one written, down to the bits of its log-probs, and a write is whole or
absent: a killed process or a full disk leaves no half trajectory. One connection, one thread; other processes may read
meanwhile.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from midflight.errors import DAMAGE, CannotWrite, UserError
from midflight.store.codec import decode_object, decode_text, encode_id_sets, encode_json, encode_text, grammar_hash
from midflight.store.entries import NewTrajectory, PhaseLine, RunRecord, TrajectoryLine, TrajectoryRecord
from midflight.store.rows import (
    checked,
    grammar_of,
    judgement_row,
    other_generation_row,
    placeholders,
    trajectory_from_rows,
    trajectory_row,
    turn_row,
)
from midflight.store.schema import SCHEMA_VERSION, TABLES
from midflight.tasks.base import Task

_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_REMEDY = "put back a copy of the file, or name another run"


class StoreError(UserError):
    """The file is not a store this version can use; the message is one line: the path, what is wrong, what to do."""


class Store:
    """The store of a run folder; a context manager that closes its connection.

    Raises:
        StoreError: `path` is not a Midflight store, or was written by a newer Midflight; from every method: the file is
            damaged, and, where one is, in which trajectory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unusable = "cannot be used as a store ({}); choose another run folder"
        try:
            # isolation_level None: transactions begin and end where this file says, nowhere else.
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=30.0)
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {unusable.format(error)}") from error
        self._connection.row_factory = sqlite3.Row
        try:
            with self._writing():
                self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise StoreError(f"{self.path}: {unusable.format(error)}") from error
        except (StoreError, CannotWrite):
            self.close()
            raise

    def _prepare(self) -> None:
        """Check the schema before the first write, so a refused file is left as it was."""
        version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        tables = int(self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path}: written with store schema {version}, this Midflight reads up to {SCHEMA_VERSION}; "
                "upgrade midflight or use another run folder"
            )
        if version == 0 and tables:
            raise StoreError(f"{self.path}: an SQLite file, but not a Midflight store; choose another run folder")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if version < SCHEMA_VERSION:
            self._connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        self._connection.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte: the rest tells kinds of one error apart
            if code in _DISK:
                raise CannotWrite(self.path, error) from error
            if code == sqlite3.SQLITE_CORRUPT:
                raise StoreError(f"{self.path}: is damaged ({error}); {_REMEDY}") from error
            raise

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Around all that reads: whatever a damaged file makes of it is one line."""
        try:
            yield
        except StoreError:
            raise
        except (sqlite3.Error, zlib.error, *DAMAGE) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(f"{self.path}: {what} cannot be read ({reason}); {_REMEDY}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._writing():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite has ended it itself when the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    def to_disk(self) -> None:
        """Wait until what was written would survive a power cut; readers are not waited for."""
        with self._writing():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def start_run(self, name: str, recipe: Mapping[str, Any], seed: int) -> int:
        """Write a run with its resolved recipe; returns its id."""
        row = (encode_text(name), str(seed), encode_json(dict(recipe), "recipe"))
        with self._transaction():
            return _id_of(self._connection.execute("INSERT INTO runs (name, seed, recipe) VALUES (?, ?, ?)", row))

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with self._reading("its runs"):
            return [
                RunRecord(
                    id=row["id"],
                    name=decode_text(row["name"]),
                    seed=int(row["seed"]),
                    recipe=decode_object(row["recipe"]),
                    created_at=row["created_at"],
                )
                for row in self._connection.execute("SELECT * FROM runs ORDER BY id")
            ]

    def finish_step(self, run_id: int, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics record of a training step beside its trajectories; a second write replaces the first."""
        row = (run_id, step, encode_json(dict(metrics), "metrics"))
        with self._transaction():
            self._connection.execute(
                "INSERT INTO steps (run_id, step, metrics) VALUES (?, ?, ?) "
                "ON CONFLICT (run_id, step) DO UPDATE SET metrics = excluded.metrics",
                row,
            )

    def steps(self, run_id: int) -> dict[int, dict[str, Any] | None]:
        """The run's training steps in order, each with its metrics (None: the step did not finish)."""
        with self._reading("its steps"):
            rows = self._connection.execute("SELECT step, metrics FROM steps WHERE run_id = ? ORDER BY step", (run_id,))
            return {row["step"]: None if row["metrics"] is None else decode_object(row["metrics"]) for row in rows}

    def add_trajectories(self, run_id: int, entries: Iterable[NewTrajectory]) -> list[int]:
        """Write many trajectories in one transaction, all or none; returns their ids in order.

        Raises:
            ValueNotStorable: arguments of a call or options of a checker have no JSON form.
            sqlite3.IntegrityError: there is no run `run_id`.
            CannotWrite: the disk is full.
        """
        with self._transaction():
            return [self._insert(run_id, entry) for entry in entries]

    def _insert(self, run_id: int, entry: NewTrajectory) -> int:
        if entry.step is not None:
            self._connection.execute("INSERT OR IGNORE INTO steps (run_id, step) VALUES (?, ?)", (run_id, entry.step))
        place = (run_id, entry.step, encode_text(entry.phase), encode_text(entry.group), entry.member)
        task = encode_json(asdict(entry.task), f"task {entry.task.id}")
        row = (*place, task, *trajectory_row(entry.trajectory), entry.reward, entry.advantage)
        columns = (
            "run_id, step, phase, group_name, member, task, query_text, query_id, query_seed, stop_reason, answer, "
            "claims, analysis, error, seconds, reward, advantage"
        )
        trajectory_id = _id_of(
            self._connection.execute(f"INSERT INTO trajectories ({columns}) VALUES ({placeholders(row)})", row)
        )
        for position, turn in enumerate(entry.trajectory.turns):
            for grammar in grammar_of(turn):
                self._connection.execute(
                    "INSERT OR IGNORE INTO grammars (hash, text) VALUES (?, ?)",
                    (grammar_hash(grammar), encode_text(grammar)),
                )
            columns_of_turn = (trajectory_id, position, *turn_row(turn))
            self._connection.execute(f"INSERT INTO turns VALUES ({placeholders(columns_of_turn)})", columns_of_turn)
            if turn.generation.supports:
                sets = encode_id_sets(turn.generation.supports)
                self._connection.execute("INSERT INTO supports VALUES (?, ?, ?)", (trajectory_id, position, sets))
            if turn.result.whole is not None:
                whole = (trajectory_id, position, encode_text(turn.result.whole))
                self._connection.execute("INSERT INTO whole_results VALUES (?, ?, ?)", whole)
            judgement = judgement_row(turn.verdict)
            if judgement is not None:
                columns_of_judgement = (trajectory_id, position, *judgement)
                self._connection.execute("INSERT INTO judgements VALUES (?, ?, ?, ?, ?)", columns_of_judgement)
            for number, (module, generation) in enumerate(turn.other_generations):
                other = (trajectory_id, position, number, *other_generation_row(module, generation))
                self._connection.execute(f"INSERT INTO other_generations VALUES ({placeholders(other)})", other)
        return trajectory_id

    def trajectories(
        self, run_id: int, phase: str | None = None, step: int | None = None, group: str | None = None
    ) -> list[TrajectoryRecord]:
        """The run's trajectories in the order they were written, of one phase, step or group where given."""
        where, values = _where({"run_id": run_id, "phase": phase, "step": step, "group_name": group})
        return self._records(f"SELECT * FROM trajectories {where} ORDER BY id", values)

    def trajectory(self, trajectory_id: int) -> TrajectoryRecord | None:
        """The trajectory of this id, of whatever run; None: there is none."""
        found = self._records("SELECT * FROM trajectories WHERE id = ?", [trajectory_id])
        return found[0] if found else None

    def phases(self) -> list[PhaseLine]:
        """What the store holds, phase by phase, the phase that was written first before the others."""
        with self._reading("its phases"):
            rows = self._connection.execute(
                "SELECT phase, min(id), max(id), min(step) AS first_step, max(step) AS last_step FROM trajectories "
                "GROUP BY phase ORDER BY min(id)"
            )
            return [PhaseLine(decode_text(phase), *numbers) for phase, *numbers in map(checked, rows)]

    def last_trajectories(self, count: int, phase: str | None = None, step: int | None = None) -> list[TrajectoryLine]:
        """The `count` trajectories written last, oldest first, of one phase or step where given."""
        where, values = _where({"phase": phase, "step": step})
        with self._reading("its trajectories"):
            rows = self._connection.execute(
                "SELECT id, phase, step, group_name, query_text, stop_reason, reward, "
                f"(SELECT count(*) FROM turns WHERE trajectory_id = id) AS turns FROM trajectories {where} "
                "ORDER BY id DESC LIMIT ?",
                [*values, count],
            ).fetchall()
        return [self._line(row) for row in reversed(rows)]

    def _line(self, row: sqlite3.Row) -> TrajectoryLine:
        with self._reading(f"trajectory {row['id']}"):
            return TrajectoryLine(
                id=checked(row)["id"],
                phase=decode_text(row["phase"]),
                step=row["step"],
                group=decode_text(row["group_name"]),
                question=decode_text(row["query_text"]),
                turns=row["turns"],
                stop_reason=row["stop_reason"],
                reward=row["reward"],
            )

    def _records(self, query: str, values: list[Any]) -> list[TrajectoryRecord]:
        with self._reading("its trajectories"):
            rows = self._connection.execute(query, values).fetchall()
            texts = self._connection.execute("SELECT * FROM grammars")
            grammars = {row["hash"]: decode_text(row["text"]) for row in texts}
        return [self._record(row, grammars) for row in rows]

    def _record(self, row: sqlite3.Row, grammars: Mapping[str, str]) -> TrajectoryRecord:
        with self._reading(f"trajectory {row['id']}"):
            turns = self._connection.execute(
                "SELECT turns.*, sets, whole, valid, sufficient, contradictions FROM turns "
                "LEFT JOIN supports USING (trajectory_id, position) "
                "LEFT JOIN whole_results USING (trajectory_id, position) "
                "LEFT JOIN judgements USING (trajectory_id, position) WHERE trajectory_id = ? ORDER BY position",
                (row["id"],),
            )
            others = self._connection.execute(
                "SELECT * FROM other_generations WHERE trajectory_id = ? ORDER BY position, place", (row["id"],)
            )
            return TrajectoryRecord(
                id=checked(row)["id"],
                run_id=row["run_id"],
                phase=decode_text(row["phase"]),
                step=row["step"],
                group=decode_text(row["group_name"]),
                member=row["member"],
                task=Task(**decode_object(row["task"])),
                trajectory=trajectory_from_rows(row, turns.fetchall(), others.fetchall(), grammars),
                reward=row["reward"],
                advantage=row["advantage"],
            )

    def drop_steps_from(self, run_id: int, step: int) -> int:
        """Remove the run's steps >= `step` and all they wrote, for a resume from before it; returns how many steps."""
        with self._transaction():
            cursor = self._connection.execute("DELETE FROM steps WHERE run_id = ? AND step >= ?", (run_id, step))
            return cursor.rowcount

    def drop_phase(self, run_id: int, phase: str) -> int:
        """Remove the run's trajectories of one phase, for an evaluation that starts over; returns how many."""
        with self._transaction():
            cursor = self._connection.execute(
                "DELETE FROM trajectories WHERE run_id = ? AND phase = ?", (run_id, encode_text(phase))
            )
            return cursor.rowcount


def _where(columns: Mapping[str, str | int | None]) -> tuple[str, list[Any]]:
    """A WHERE clause for the columns that have a value, and the values."""
    wanted = {f"{column} = ?": value for column, value in columns.items() if value is not None}
    values = [encode_text(value) if isinstance(value, str) else value for value in wanted.values()]
    return f"WHERE {' AND '.join(wanted)}" if wanted else "", values


def _id_of(cursor: sqlite3.Cursor) -> int:
    assert cursor.lastrowid is not None  # an INSERT always sets it
    return cursor.lastrowid
