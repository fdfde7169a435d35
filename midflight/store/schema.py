"""The tables of a store. A change here raises SCHEMA_VERSION; an older program then refuses the file in one line.

Version 2 added `supports`, version 3 `whole_results` and `judgements`. A change may only add tables: opening an older
file makes those it lacks.
"""

from __future__ import annotations

SCHEMA_VERSION = 3

# Shared by `turns` (the planner's) and `other_generations`; `rows.generation_row` writes it in this order.
_GENERATION = """
    text TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    prompt_ids BLOB NOT NULL,
    ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    forced BLOB NOT NULL,
    weights_version INTEGER NOT NULL,
    sampling TEXT NOT NULL,
    grammar TEXT REFERENCES grammars(hash)
"""

TABLES = f"""
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    seed TEXT NOT NULL,
    recipe TEXT NOT NULL,
    created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS steps (
    run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    metrics TEXT,
    PRIMARY KEY (run_id, step)
);
CREATE TABLE IF NOT EXISTS grammars (
    hash TEXT PRIMARY KEY,
    text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS trajectories (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    step INTEGER,
    phase TEXT NOT NULL,
    group_name TEXT NOT NULL,
    member INTEGER NOT NULL,
    task TEXT NOT NULL,
    query_text TEXT NOT NULL,
    query_id TEXT NOT NULL,
    query_seed TEXT,
    stop_reason TEXT NOT NULL,
    answer TEXT,
    claims TEXT NOT NULL,
    analysis TEXT NOT NULL,
    error TEXT NOT NULL,
    seconds REAL NOT NULL,
    reward REAL,
    advantage REAL,
    FOREIGN KEY (run_id, step) REFERENCES steps(run_id, step) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS trajectories_by_run ON trajectories(run_id, phase, step);
CREATE INDEX IF NOT EXISTS trajectories_by_step ON trajectories(run_id, step);
CREATE TABLE IF NOT EXISTS turns (
    trajectory_id INTEGER NOT NULL REFERENCES trajectories(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    {_GENERATION.strip()},
    sub_goal TEXT,
    tool TEXT,
    context TEXT,
    called_tool TEXT,
    arguments TEXT,
    result TEXT NOT NULL,
    error_kind TEXT,
    verdict_stop INTEGER NOT NULL,
    verdict_reason TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (trajectory_id, position)
);
CREATE TABLE IF NOT EXISTS supports (
    trajectory_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    sets BLOB NOT NULL,
    PRIMARY KEY (trajectory_id, position),
    FOREIGN KEY (trajectory_id, position) REFERENCES turns(trajectory_id, position) ON DELETE CASCADE
);
CREATE TABLE IF NOT EXISTS whole_results (
    trajectory_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    whole TEXT NOT NULL,
    PRIMARY KEY (trajectory_id, position),
    FOREIGN KEY (trajectory_id, position) REFERENCES turns(trajectory_id, position) ON DELETE CASCADE
);
CREATE TABLE IF NOT EXISTS judgements (
    trajectory_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    valid INTEGER,
    sufficient INTEGER,
    contradictions TEXT NOT NULL,
    PRIMARY KEY (trajectory_id, position),
    FOREIGN KEY (trajectory_id, position) REFERENCES turns(trajectory_id, position) ON DELETE CASCADE
);
CREATE TABLE IF NOT EXISTS other_generations (
    trajectory_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    place INTEGER NOT NULL,
    module TEXT NOT NULL,
    {_GENERATION.strip()},
    PRIMARY KEY (trajectory_id, position, place),
    FOREIGN KEY (trajectory_id, position) REFERENCES turns(trajectory_id, position) ON DELETE CASCADE
);
"""
